"""The best candidate fits and is fast, times move the right way, and launcher and shellcheck accept the script."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.cli import plan
from openrlhf_gtpo.errors import SettingError
from openrlhf_gtpo.model_shape import PRESETS
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.candidate import SYNC_BUCKET, Candidate
from openrlhf_gtpo.tools.planner.cluster import GIB, parse_cluster
from openrlhf_gtpo.tools.planner.output import details, launch_script, ranking, trainer_flags
from openrlhf_gtpo.tools.planner.plan import Request, candidates, planned_config, smallest_cluster
from openrlhf_gtpo.tools.planner.workload import Workload

FOUR_NODES = "--model 32b --gpus 32 --gpu h100-80g --nodes 4"
WORK = Workload(prompts_per_step=8)
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}


def request(model: str = "7b", gpus: int = 8, workload: Workload = WORK, **asked: Any) -> Request:
    return Request(planned_config(model), parse_cluster("h100-80g", gpus), workload, **asked)


def one(asked: Request) -> Candidate:
    (found,) = candidates(asked)
    return found


FIXED: dict[str, Any] = {"tensor": 4, "pipeline": 1, "context": 1, "fp8": "off", "recompute": "none", "vllm_tensor": 4}


def test_the_best_fits_and_is_about_the_fastest() -> None:
    found = candidates(request("32b", 32))
    fitting = [candidate for candidate in found if candidate.fits]
    assert 0 < len(fitting) < len(found) and found[: len(fitting)] == fitting
    assert found[0].step_seconds <= 1.03 * min(candidate.step_seconds for candidate in fitting)
    for candidate in fitting:
        assert max(sum(parts.values()) for parts in candidate.memory.values()) <= candidate.limit
        shown = details(candidate)
        assert ("risk: less than 3 GiB" in shown) == (-candidate.breaks[1] < 3 * GIB)
        assert ("measured: " in shown) == (candidate.training.fp8 is not None)
    over = [candidate.breaks[1] for candidate in found[len(fitting) :]]
    assert over == sorted(over) and over[0] > 0


def test_every_candidate_is_legal_for_the_actor() -> None:
    from openrlhf_gtpo.megatron.fp8.options import check_fp8
    from openrlhf_gtpo.megatron.parallel.layout import check_layout

    asked = request("32b", 32)
    for candidate in candidates(asked):
        training = candidate.training
        check_layout(asked.config, training.layout, 32)
        assert training.layout.model_parallel_size * training.data_parallel == 32
        if training.fp8 is not None:
            check_fp8(training.fp8, asked.config, training.layout, cuda=True)


def test_times_move_the_right_way() -> None:
    base = one(request(**FIXED))
    work = WORK
    assert one(request(**FIXED | {"recompute": "full"})).seconds["train"] > 1.2 * base.seconds["train"]
    assert one(request(**FIXED | {"fp8": "e4m3", "fp8_recipe": "blockwise"})).seconds["train"] < base.seconds["train"]
    assert one(request(workload=replace(work, mean_response=2000.0), **FIXED)).step_seconds > base.step_seconds
    twice = one(request(workload=replace(work, prompts_per_step=16), **FIXED))
    assert 1.7 < twice.seconds["train"] / base.seconds["train"] < 2.1
    assert (
        twice.seconds["rollout"] < 1.7 * base.seconds["rollout"]
    ), "a larger batch decodes with the same reads of weights"
    kl = one(request(workload=replace(work, kl=True), **FIXED))
    assert kl.seconds["forward"] == pytest.approx(2 * base.seconds["forward"])
    assert sum(kl.memory["forward"].values()) > sum(base.memory["forward"].values())


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 0),
        ({"kl": True}, 1),
        ({"train_batch": WORK.rows // 2}, 1),
        ({"train_batch": WORK.rows // 2, "log_probs": "sampler"}, 0),
    ],
    ids=str,
)
def test_the_samplers_entropies_save_the_policys_forward(changes: dict[str, Any], forwards: int) -> None:
    """With one optimizer step per rollout, or the sampler's log-probs, no log-probs of the policy are needed."""
    base = one(request(**FIXED)).seconds["forward"]
    found = one(request(workload=replace(WORK, entropy="sampler", **changes), **FIXED))
    assert found.seconds["forward"] == pytest.approx(forwards * base, rel=0.2)
    assert "--rollout.entropy sampler" in trainer_flags(found)
    assert any("--rollout.log_probs" in flag for flag in trainer_flags(found)) == ("log_probs" in changes)
    with pytest.raises(SettingError, match="give entropy sampler"):
        replace(WORK, log_probs="sampler")


def test_another_value_is_assumed_and_reaches_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "7b", "--gpus", "8", "--assume", "vllm_rows=128", "--assume", "overlap=0"]
    words += ["--assume", "lm_head_mb=2048"]
    assert plan.main([*words, "--json", "--emit", str(tmp_path / "plan.sh")]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumptions"]
    assert assumed == asdict(Assumptions()) | {"vllm_rows": 128, "overlap": False, "lm_head_mb": 2048}
    script = (tmp_path / "plan.sh").read_text()
    assert 'VLLM_MAX_NUM_SEQS="${VLLM_MAX_NUM_SEQS-128}"' in script and "overlap_grad_reduce=false" in script
    assert " --megatron.lm_head_mb 2048)\n" in script


def test_the_lm_head_works_in_what_it_is_given() -> None:
    asked = request("7b", 8, **FIXED)
    small, own = (
        one(replace(asked, assumptions=replace(asked.assumptions, lm_head_mb=size))).memory for size in (512, 1024)
    )
    assert one(asked).memory == own
    assert own["forward"]["activations"] - small["forward"]["activations"] == 512 * 2**20
    assert own["train"]["head"] > small["train"]["head"]


def test_what_travels_hides_behind_passes() -> None:
    work = replace(WORK, train_batch=WORK.rows // 4)
    asked = request("32b", 32, work, tensor=8, pipeline=1, context=1, fp8="off", recompute="none")
    apart = one(replace(asked, assumptions=replace(asked.assumptions, overlap=False)))
    hidden, shown = one(asked).speed.optimizer_step(), apart.speed.optimizer_step()
    assert all(hidden[part] == shown[part] for part in ("passes", "update"))
    assert hidden["reduction"] < shown["reduction"] / 5 and hidden["gather"] < shown["gather"]
    assert "--megatron.ddp overlap_grad_reduce=false" in " ".join(trainer_flags(apart))
    assert trainer_flags(one(asked)) == []


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 8 * 768),
        ({"max_tokens_per_gpu": 4096}, 4096),
        ({"max_tokens_per_gpu": 500}, 768),  # a row
        ({"train_batch": 8}, 2 * 768),  # a rollout of 15 rows makes one optimizer step
        ({"train_batch": 32}, 8 * 768),
        ({"train_batch": 8, "prompts_per_step": 1}, 768),
    ],
    ids=str,
)
def test_activations_are_of_no_more_rows_than_there_are(changes: dict[str, Any], tokens: int) -> None:
    work = replace(Workload(256, 512, samples_per_prompt=8, prompts_per_step=8), **changes)
    found = one(request("3b", 8, work, **FIXED | {"tensor": 1, "vllm_tensor": 1}))
    assert found.training.tokens == tokens and found.fits
    rollout = one(request("3b", 8, replace(work, train_batch=None), **FIXED | {"tensor": 1, "vllm_tensor": 1}))
    assert found.memory["forward"] == rollout.memory["forward"]
    script = launch_script(found, algorithm="gtpo", model="MODEL", command="")
    assert f'MAX_TOKENS_PER_GPU="${{MAX_TOKENS_PER_GPU-{max(768, work.max_tokens_per_gpu)}}}"' in script


def test_less_is_kept_the_more_is_computed_again() -> None:
    kinds = [
        one(request("32b", 32, tensor=8, pipeline=1, context=1, recompute=kind, fp8="off"))
        for kind in ("none", "selective", "full")
    ]
    passes = [kind.speed.optimizer_step()["passes"] for kind in kinds]
    kept = [kind.activations()[kind.training.recompute] for kind in kinds]
    assert passes == sorted(passes) and kept == sorted(kept, reverse=True) and len(set(passes)) == 3


def test_a_pipeline_waits_for_its_first_micro_batch() -> None:
    """On two stages, m micro-batches take (m + 1) / m times as long as their work alone."""
    work = Workload(
        prompt_length=100, response_length=900, mean_prompt=100, mean_response=900, max_tokens_per_gpu=1000
    )
    layout = FIXED | {"tensor": 1, "pipeline": 2, "vllm_tensor": 1}
    long, short = (one(request(gpus=2, workload=replace(work, train_batch=rows), **layout)) for rows in (128, 8))
    assert (long.speed.micro_batches, short.speed.micro_batches) == (128, 8)
    ratio = short.speed.optimizer_step()["passes"] / long.speed.optimizer_step()["passes"]
    assert ratio == pytest.approx(9 / 129, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "gpus", "legal"),
    [
        ({}, 6, {1, 2, 3, 6}),
        ({"num_key_value_heads": 4}, 6, {1, 2}),  # 3 and 6 neither divide nor repeat four
        ({"num_key_value_heads": 2}, 6, {1, 2, 6}),
        ({"intermediate_size": 512}, 6, {1, 2}),
        ({"vocab_size": 500}, 6, {1, 2}),  # padded to 512
    ],
    ids=str,
)
def test_engines_are_those_that_vllm_starts(sizes: dict[str, int], gpus: int, legal: set[int]) -> None:
    divisible = {"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 768, "vocab_size": 576}
    config = SimpleNamespace(**PRESETS["tiny"] | divisible | {"hidden_size": 768} | sizes)
    asked = Request(config, parse_cluster("h100-80g", gpus), replace(WORK, prompts_per_step=6), fp8="off")
    for size in range(1, gpus + 1):
        if size in legal:
            assert candidates(replace(asked, vllm_tensor=size))[0].engines.tensor == size
        else:
            with pytest.raises(SettingError, match=f"vllm_tensor_parallel {size} must divide .*; it can be 1, 2"):
                candidates(replace(asked, vllm_tensor=size))


def test_decoding_reads_what_it_must() -> None:
    """One sequence on one GPU: the weights except the embedding, at 70 % of 3350 GB/s, and next to nothing else."""
    work = Workload(prompt_length=1, response_length=100, mean_response=100, samples_per_prompt=1, prompts_per_step=1)
    engines = one(request(gpus=1, workload=work, **FIXED | {"tensor": 1, "vllm_tensor": 1})).engines
    read = 2 * (engines.shape.parameters - 152064 * 3584) / (0.7 * 3350e9)
    assert engines.seconds == pytest.approx(100 * (read + engines.assumptions.decode_step), rel=0.02)


def test_a_decode_step_takes_what_the_gpu_or_vllms_python_needs() -> None:
    """1024 rows of a 7B model on one GPU wait for the Python, 16 for the weights."""
    fixed = FIXED | {"tensor": 1, "vllm_tensor": 1, "vllm_memory": 0.9}
    rows = {"prompt_length": 1, "response_length": 100, "mean_response": 100}
    many, few = (one(request(gpus=1, workload=Workload(**rows, prompts_per_step=n), **fixed)).engines for n in (64, 1))
    for engines, bound in ((many, True), (few, False)):
        python = 100 * engines.rows * engines.assumptions.decode_row
        assert (engines.seconds == pytest.approx(python, rel=0.02)) == bound and engines.seconds >= python
        faster = replace(engines, assumptions=replace(engines.assumptions, decode_row=0))
        assert (faster.seconds < 0.9 * engines.seconds) == bound


def test_full_engines_take_turns() -> None:
    """Rows wait if the cache has no room for them."""
    work = Workload(prompts_per_step=64)
    small, large = (
        one(replace(request("7b", 1, work, **FIXED | {"tensor": 1, "vllm_tensor": 1}), vllm_memory=m))
        for m in (0.35, 0.85)
    )
    assert small.engines.recomputed > 0 and large.engines.recomputed == 0
    assert "are computed again" in details(small) and "computed again" not in details(large)
    assert small.engines.seconds > large.engines.seconds
    none = one(replace(request("7b", 4, work, **FIXED | {"tensor": 4, "vllm_tensor": 1}), vllm_memory=0.18))
    assert not none.engines.fits and not none.fits
    assert "does not fit: kv_cache" in ranking([none], 1) and "what breaks first: KV cache" in details(none)


def test_all_responses_to_a_prompt_come_from_one_engine() -> None:
    """Of 8 engines, 3 prompts keep 5 idle, and 12 give some twice as many as others (openrlhf, samples_generator.py,
    ``_dispatch_prompts_to_vllm``)."""
    for prompts, rows in ((3, 16), (12, 32)):
        work = Workload(prompts_per_step=prompts)
        engines = one(request(workload=work, **FIXED | {"tensor": 4, "vllm_tensor": 1})).engines
        assert (engines.count, engines.rows) == (8, rows)


def test_split_and_colocated_share_the_gpus() -> None:
    asked = request("7b", 8)
    for candidate in candidates(replace(asked, colocated=False)):
        assert candidate.cluster.gpus + candidate.engines.gpus == candidate.gpus == 8
        assert "vllm_asleep" not in candidate.memory["train"] and "weights" not in candidate.memory["rollout"]
    fixed = candidates(replace(asked, colocated=False, rollout_gpus=4))
    assert {candidate.engines.gpus for candidate in fixed} == {4}


def test_an_asynchronous_step_takes_the_longer_of_rollout_and_training() -> None:
    asked = replace(request("7b", 8), colocated=False, rollout_gpus=4)
    in_turn, ahead = candidates(asked)[0], replace(candidates(asked)[0], async_enable=True)
    parts = in_turn.seconds
    shorter = min(parts["rollout"], parts["forward"] + parts["train"])
    assert ahead.seconds == parts and in_turn.step_seconds - ahead.step_seconds == pytest.approx(shorter)
    assert all(candidate.async_enable for candidate in candidates(replace(asked, async_enable=True)))


def test_without_offload_both_must_fit_at_once() -> None:
    asked = request(**FIXED)
    on, off = one(asked), one(replace(asked, offload=False))
    held = sum(off.memory["rollout"].values()) - sum(on.memory["rollout"].values())
    assert held >= 2 * 7.6e9 / 4 and off.seconds["between"] < on.seconds["between"]


def test_start_and_save_are_planned_for() -> None:
    """32B on eight GPUs, where neither a resumed optimizer with gradients and a reference nor gradients with the
    engines' weights would fit."""
    eight = replace(request("32b", 8, replace(WORK, kl=True), **FIXED | {"tensor": 8, "recompute": "full"}))
    found = one(eight)
    weights, optimizer = 2 * found.training.shape.parameters / 8, 12 * found.training.shape.parameters / 8
    start, train, save = (found.memory[phase] for phase in ("start", "train", "save"))
    assert start.keys() == {"context", "vllm_asleep", "weights", "reference", "optimizer"}
    assert "reference" not in train, "it rests between its forward passes"
    assert start["reference"] == pytest.approx(weights, rel=0.01) and start["weights"] == start["reference"]
    assert start["optimizer"] == save["optimizer"] == pytest.approx(optimizer, rel=0.01)
    assert save.keys() == {"context", "vllm_weights", "vllm_working", "weights", "optimizer"}
    assert found.breaks[0] == "save" and found.fits
    # With many replicas, a start holds its float32 weights and gradients, not the optimizer's share of a resume.
    many = one(replace(eight, cluster=parse_cluster("h100-80g", 64))).memory["start"]
    assert many["gradients"] == pytest.approx(2 * weights, rel=0.01)
    assert many["optimizer"] == pytest.approx(optimizer / 8 / 3, rel=0.01)
    staying = one(replace(eight, offload=False)).memory
    parts = {"weights", "reference", "gradients", "optimizer"}
    assert all(parts <= phase.keys() for phase in staying.values()), "in every phase"


def test_what_fp8_keeps_twice_is_planned_for() -> None:
    """The rows of a reference that stays on the device, and BF16 copies of primary weights for a checkpoint."""
    eight = replace(request("7b", 8, replace(WORK, kl=True), **FIXED), offload=False)
    bf16, cached = one(eight).memory, one(replace(eight, fp8="hybrid", fp8_recipe="tensorwise")).memory
    rows = cached["save"]["reference"] - bf16["save"]["reference"]
    assert rows == pytest.approx(cached["forward"]["fp8_caches"] / 2) and rows > 0
    primary = one(replace(eight, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)).memory
    for phase in ("start", "save"):
        assert primary[phase]["bf16_copies"] == pytest.approx(2 * rows) and "bf16_copies" not in cached[phase]


@pytest.mark.parametrize("tensor", [1, 2])
def test_an_embedding_larger_than_a_bucket_has_one_of_its_own(tensor: int) -> None:
    found = one(request("7b", 8, WORK, **FIXED | {"tensor": tensor}))
    size = 2.0 * found.training.shape.vocab_size * found.training.shape.hidden_size
    assert size > SYNC_BUCKET
    beside = {1: 0.0, 2: 2.5}[tensor] * size
    assert found.memory["sync"]["sync_bucket"] == size + SYNC_BUCKET + beside


def test_host_memory_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas, two copies of the reference and two engines, at 2 bytes a parameter each; one optimizer at 12."""
    found = one(request("7b", 8, replace(WORK, kl=True), **FIXED))
    in_all = 8 * found.host_bytes
    assert in_all == pytest.approx((3 * 2 * 2 + 12) * found.training.shape.parameters, rel=0.01)
    assert f"offloading keeps, pinned: {in_all / 2**30:.0f} GiB" in details(found)
    split = one(replace(request("7b", 8, **FIXED), colocated=False, rollout_gpus=4))
    assert split.host_bytes == 0 and "host memory" not in details(split)


@pytest.mark.parametrize(
    "cluster, nearest",
    [("--gpus 4 --gpu a100-40g", "4 × a100-40g: the nearest, TP4"), ("--gpus 1", "1 × h100-80g: the nearest, TP1")],
)
def test_a_model_that_fits_nowhere(cluster: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(f"--model 32b {cluster} --fp8 off".split()) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"plan: 32b fits nowhere on {nearest} PP1 CP1 DP1, bf16, recompute full, is ")
    assert "the smallest cluster of them on which it would fit has " in message and message.count("\n") == 1


def test_the_smallest_cluster_is_smallest() -> None:
    asked = replace(request("32b", 2), cluster=parse_cluster("h100-80g", 2))
    assert not candidates(asked)[0].fits
    found = smallest_cluster(asked)
    assert found is not None and found.gpus == 8 and found.fits
    assert not candidates(replace(asked, cluster=parse_cluster("h100-80g", 4)))[0].fits


def test_experts_are_planned_for() -> None:
    asked = Request(SimpleNamespace(**MOE), parse_cluster("h100-80g", 16), WORK)
    found = candidates(asked)
    assert found[0].fits and {candidate.training.layout.expert_model_parallel_size for candidate in found} >= {
        1,
        2,
        4,
        8,
    }
    assert all(candidate.training.fp8 is None for candidate in found)


def test_experts_are_divided_among_context_parallel_ranks_first() -> None:
    """TP2 × EP4 fit a node of 8, whatever CP is, so nothing crosses the network (``megatron/parallel/groups.py``)."""
    cluster = parse_cluster("h100-80g", 16)
    sizes = {"tensor": 2, "pipeline": 1, "context": 2, "expert": 4, "vllm_tensor": 1, "recompute": "none"}
    near, far = (
        one(Request(SimpleNamespace(**MOE), replace(cluster, network=network), WORK, **sizes)).speed
        for network in (50e9, 5e9)
    )
    assert near._collectives() == far._collectives()


def test_a_group_that_straddles_two_nodes_uses_the_network() -> None:
    """Of 2 × 6 GPUs, ranks 4 and 6 share a sequence at TP2 CP2."""
    cluster, work = parse_cluster("h100-80g", 12, 2), replace(WORK, prompts_per_step=6)
    sizes = FIXED | {"tensor": 2, "context": 2, "vllm_tensor": 1}
    near, far = (
        one(Request(planned_config("7b"), replace(cluster, network=network), work, **sizes)).speed
        for network in (50e9, 5e9)
    )
    assert near._collectives() < far._collectives()


def test_experts_that_only_one_rank_holds_are_updated_there_and_not_reduced() -> None:
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 8, "vllm_tensor": 1, "recompute": "none"}
    asked = Request(SimpleNamespace(**MOE), parse_cluster("h100-80g", 8), WORK, **sizes)
    speed = one(replace(asked, assumptions=Assumptions(overlap=False))).speed
    parts = speed.training.stage_parameters(0)
    rest, seconds = sum(parts.values()) - parts["experts"], speed.optimizer_step()
    assert seconds["update"] == pytest.approx(30 * (parts["experts"] + rest / 8) / (0.8 * 3350e9))
    assert seconds["reduction"] == pytest.approx(4 * rest * 7 / 8 / (0.75 * 450e9))


def test_hundreds_of_gpus_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert plan.main("--model 32b --gpus 512 --nodes 64 --prompts-per-step 64".split()) == 0
    assert time.monotonic() - began < 60  # 2 s on an idle machine
    assert "32b on 512 × h100-80g in 64 nodes" in capsys.readouterr().out


def test_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*FOUR_NODES.split(), "--json", "--top", "3"]) == 0
    written = json.loads(capsys.readouterr().out)
    best = written["candidates"][0]
    assert len(written["candidates"]) == 3 and best["fits"] and written["assumptions"]["compute_bf16"] > 0
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])
    parts = {"weights", "gradients", "optimizer", "activations", "head", "fp8_caches"}
    assert parts <= set(best["memory_bytes"]["train"])
    assert {"kv_cache", "vllm_weights"} <= set(best["memory_bytes"]["rollout"])
    assert "sync_bucket" in best["memory_bytes"]["sync"]


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*FOUR_NODES.split(), "--assumptions"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "tok/s/GPU",
        "what breaks first: ",
        "activations by recompute: none",
        "KV cache",
        "assumed:",
        "compute_fp8",
    ):
        assert part in printed


def test_one_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model tiny --gpus 1 --fp8 off --recompute none --context-parallel 1 --pipeline-parallel 1"
    assert plan.main([*words.split(), "--train-batch", "2048"]) == 0
    printed = capsys.readouterr().out
    assert "colocated: 1 candidate, 1 fits\n" in printed and "; 1 engine of 1 GPU\n" in printed


def test_a_script_that_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in for the launcher prints what it gets; the environment wins over the script."""
    path = tmp_path / "scripts of mine" / "train.sh"
    words = [*FOUR_NODES.split(), "--tensor-parallel", "8", "--algorithm", "grpo_s", "--emit", str(path)]
    assert plan.main(words) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    (tmp_path / "examples" / "scripts").mkdir(parents=True)
    (tmp_path / "examples" / "scripts" / "train.sh").write_text(
        'echo "$ALGORITHM $MODEL $PLACEMENT $NODES×$GPUS_PER_NODE TP$TENSOR_PARALLEL '
        "$VLLM_ENGINES×$VLLM_TENSOR_PARALLEL "
        '$SAMPLES_PER_PROMPT $PROMPTS_PER_STEP $TRAIN_BATCH $PROMPT_LENGTH $RESPONSE_LENGTH [$FP8] $*"\n'
    )
    environment = {"PATH": os.environ["PATH"], "MODEL": "/models/mine"}
    ran = subprocess.run(
        ["bash", str(path), "--dry-run"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("grpo_s /models/mine colocated 4×8 TP8 4×8 16 128 128 2048 4096 [")
    assert ran.stdout.endswith("] gtpo_colocated --dry-run\n")
    mine = ["--", "--actor.adam.lr", "5e-7"]
    ran = subprocess.run(["bash", str(path), *mine], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.stdout.endswith("] gtpo_colocated -- --actor.adam.lr 5e-7\n")
    elsewhere = subprocess.run(["bash", str(path)], cwd=path.parent, env=environment, capture_output=True, text=True)
    assert elsewhere.returncode == 2 and "run this from the root of openrlhf_gtpo" in elsewhere.stderr


def test_a_script_finds_a_local_model_from_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    monkeypatch.chdir(tmp_path)
    for model in ("my model", "my model/config.json"):
        assert plan.main(["--model", model, "--gpus", "1", "--emit", "a plan.sh"]) == 0
        assert capsys.readouterr().out.endswith(f"root: bash '{tmp_path / 'a plan.sh'}' --dry-run\n")
        assert f'export MODEL="${{MODEL-{folder}}}"\n' in Path("a plan.sh").read_text()


def test_flags_of_the_script_are_the_trainer_s() -> None:
    from openrlhf_gtpo.training.settings.megatron_flags import MEGATRON

    asked = Request(SimpleNamespace(**MOE), parse_cluster("h100-80g", 16), WORK, tensor=2, expert=8)
    flags = " ".join(trainer_flags(candidates(replace(asked, distributed_optimizer=False))[0])).split()
    parser = argparse.ArgumentParser()
    MEGATRON.add_to(parser)
    parsed = vars(parser.parse_args(flags))
    assert parsed["megatron.expert_model_parallel_size"] == 8
    assert not parsed["megatron.use_distributed_optimizer"]


def test_a_sampler_whose_entropies_save_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in (("", True), ("--log-probs sampler", False), ("--train-batch 2048", False)):
        assert plan.main(["--model", "7b", "--gpus", "8", "--entropy", "sampler", *more.split()]) == 0
        assert ("--entropy sampler saves nothing: a rollout's 16 optimizer steps" in capsys.readouterr().out) == said


def test_the_script_of_a_plan_with_a_reference_has_one(tmp_path: Path) -> None:
    """The reference runs on the GPUs that were planned, and never without its coefficient."""
    path = tmp_path / "plan.sh"
    (tmp_path / "examples" / "scripts").mkdir(parents=True)
    (tmp_path / "examples" / "scripts" / "train.sh").write_text('echo "$NODES×$GPUS_PER_NODE ${planned[*]}"\n')
    for words, flags in (
        ("--gpus 16", ""),
        (
            "--gpus 16 --placement split --rollout-gpus 8 --entropy sampler",
            " --train.colocate_actor_ref --algo.kl.use_loss",
        ),
    ):
        assert plan.main(["--model", "7b", *words.split(), "--kl", "--emit", str(path)]) == 0
        environment = {"PATH": os.environ["PATH"]}
        without, ran = (
            subprocess.run(["bash", str(path)], cwd=tmp_path, env=environment | more, capture_output=True, text=True)
            for more in ({}, {"KL": "0.04"})
        )
        assert without.returncode and "KL: must be set" in without.stderr
        nodes = 1 if flags else 2
        reference = f"--algo.kl.init_coef 0.04 --ref.num_nodes {nodes} --ref.num_gpus_per_node 8"
        assert ran.stdout.startswith(f"{nodes}×8 ") and reference in ran.stdout
        assert all(flag in ran.stdout for flag in flags.split())


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed")
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(MOE))
    for i, words in enumerate(
        [
            FOUR_NODES,
            "--model 7b --gpus 8 --placement split --fp8 off --kl",
            f"--model {tmp_path / 'moe'} --gpus 16 --expert-parallel 8",
        ]
    ):
        path = tmp_path / f"{i}.sh"
        assert plan.main([*words.split(), "--emit", str(path)]) == 0
        checked = subprocess.run([program, "-x", str(path)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    assert "--megatron.expert_model_parallel_size 8" in path.read_text()
