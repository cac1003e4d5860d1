"""The best candidate fits and is fast, times move the right way, and launcher and shellcheck accept the script."""

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.errors import SettingError
from openrlhf_gtpo.model_shape import PRESETS
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.candidate import Candidate
from openrlhf_gtpo.tools.planner.cluster import GIB, parse_cluster
from openrlhf_gtpo.tools.planner.output import details, launch_script, ranking, trainer_flags
from openrlhf_gtpo.tools.planner.plan import Request, candidates, planned_config
from openrlhf_gtpo.tools.planner.workload import Workload

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
            with pytest.raises(SettingError, match=f"vllm_tensor_parallel {size} must divide .*; give one of 1, 2"):
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


def test_an_asynchronous_step_takes_the_longer_of_rollout_and_training() -> None:
    asked = replace(request("7b", 8), colocated=False, rollout_gpus=4)
    in_turn, ahead = candidates(asked)[0], replace(candidates(asked)[0], async_enable=True)
    parts = in_turn.seconds
    shorter = min(parts["rollout"], parts["forward"] + parts["train"])
    assert ahead.seconds == parts and in_turn.step_seconds - ahead.step_seconds == pytest.approx(shorter)
    assert all(candidate.async_enable for candidate in candidates(replace(asked, async_enable=True)))


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


def test_experts_that_only_one_rank_holds_are_updated_there_and_not_reduced() -> None:
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 8, "vllm_tensor": 1, "recompute": "none"}
    asked = Request(SimpleNamespace(**MOE), parse_cluster("h100-80g", 8), WORK, **sizes)
    speed = one(replace(asked, assumptions=Assumptions(overlap=False))).speed
    parts = speed.training.stage_parameters(0)
    rest, seconds = sum(parts.values()) - parts["experts"], speed.optimizer_step()
    assert seconds["update"] == pytest.approx(30 * (parts["experts"] + rest / 8) / (0.8 * 3350e9))
    assert seconds["reduction"] == pytest.approx(4 * rest * 7 / 8 / (0.75 * 450e9))


def test_flags_of_the_script_are_the_trainer_s() -> None:
    from openrlhf_gtpo.training.settings.megatron_flags import MEGATRON

    asked = Request(SimpleNamespace(**MOE), parse_cluster("h100-80g", 16), WORK, tensor=2, expert=8)
    flags = " ".join(trainer_flags(candidates(replace(asked, distributed_optimizer=False))[0])).split()
    parser = argparse.ArgumentParser()
    MEGATRON.add_to(parser)
    parsed = vars(parser.parse_args(flags))
    assert parsed["megatron.expert_model_parallel_size"] == 8
    assert not parsed["megatron.use_distributed_optimizer"]
