"""One optimizer step is one gradient and one set of metrics, however micro-batches and replicas split its rows."""

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.trainer.ray.launcher import RayActorGroup

from openrlhf_gtpo.checkpoints.folder import write_manifest
from openrlhf_gtpo.report import names
from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens
from openrlhf_gtpo.training.actors import dispatch, optimizer_steps
from openrlhf_gtpo.training.actors.dispatch import ActorGroup
from openrlhf_gtpo.training.actors.optimizer_steps import RowOrder, deal_rows
from openrlhf_gtpo.training.credit.old_policy import count_all_steps
from tests.support.families import make_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.steps_program import run_averages, run_gathers, run_poisoned, run_ratios, run_rounds, run_whole_step
from tests.support.tp_program import sent_weights

LENGTHS = [9, 4, 12, 2, 7, 1, 10, 8, 5, 3, 11, 6, 13, 2, 9, 4]
# The second round is short, as after the data's end or a filter; the last leaves one of two replicas without a row.
ROUNDS = [LENGTHS, LENGTHS[:12], LENGTHS, LENGTHS[:1]]
COMMON = ["--train.batch_size", "16", "--actor.adam.lr", "0", "--critic.adam.lr", "0", "--algo.kl.init_coef", "0"]
WHOLE = ["--train.micro_batch_size", "16"]
THREES = ["--train.micro_batch_size", "3"]
BY_TOKENS = ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "30"]
# Rows of four with the same prompt; nothing is clipped, which bf16's rounding would decide.
GROUPED = ["--train.shared_prompts", "off", "--actor.eps_clip_low_high", "0.99", "9"]
SHARED = ["--train.shared_prompts", "on"]
CORRECTION = [
    "--algo.advantage.is_correction_level",
    "seq",
    "--algo.advantage.is_correction_threshold",
    "0.998",
    "1.002",
]
ENTROPY = ["--actor.entropy_coef", "0.01"]
GUIDE = ["--algo.guide.model_name_or_path", "guide", "--algo.guide.fraction", "0.3"]
ESTIMATORS = {
    "gtpo": ["--algo.advantage.estimator", "gtpo", *ENTROPY, *CORRECTION],
    "grpo_s": ["--algo.advantage.estimator", "grpo_s", *ENTROPY, *CORRECTION],
    "grpo": ["--algo.preset", "grpo", *ENTROPY, "--algo.kl.init_coef", "0.1"],
    "critic": ["--algo.advantage.estimator", "gae"],
    "gtpo with sapo": ["--algo.advantage.estimator", "gtpo", "--actor.policy_loss_type", "sapo", *ENTROPY],
    "grpo with gmpo": ["--algo.preset", "gmpo", *ENTROPY],
    "grpo with htpo": ["--algo.preset", "htpo", "--actor.htpo.forking_fraction", "0.5"],
    "grpo with hapo": ["--algo.preset", "hapo"],
    "gtpo with a guide": ["--algo.advantage.estimator", "gtpo", *GUIDE, *CORRECTION],
    "gtpo in groups": ["--algo.advantage.estimator", "gtpo", *ENTROPY, *GROUPED],
    "grpo_s in groups": ["--algo.advantage.estimator", "grpo_s", *ENTROPY, *GROUPED],
    "critic in groups": ["--algo.advantage.estimator", "gae", *GROUPED],
    "grpo with rescues": [
        "--algo.preset",
        "grpo",
        *GUIDE,
        "--algo.guide.rescue_batch",
        "4",
        "--algo.kl.init_coef",
        "0.1",
    ],
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def whole(actor_model: str, pools: dict[int, RankPool]) -> dict[str, list[dict[str, float]]]:
    """Each estimator's rounds in one process and one micro-batch."""
    return {
        name: pools[1].run(run_rounds, "deepspeed", actor_model, [*COMMON, *argv, *WHOLE], ROUNDS)[0]
        for name, argv in ESTIMATORS.items()
    }


@pytest.mark.parametrize(
    ("name", "processes", "argv"),
    [
        ("gtpo", 2, THREES),
        ("gtpo", 2, [*BY_TOKENS, "--ds.zero_stage", "1"]),
        ("gtpo", 2, [*THREES, "--ds.zero_stage", "1", "--ds.grad_accum_dtype", "fp32"]),
        ("gtpo", 2, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo_s", 2, BY_TOKENS),
        ("grpo_s", 2, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo", 2, BY_TOKENS),
        ("grpo", 2, [*BY_TOKENS, "--ds.zero_stage", "3"]),
        ("grpo", 1, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("critic", 2, BY_TOKENS),
        ("gtpo with sapo", 1, THREES),
        ("gtpo with sapo", 1, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo with gmpo", 1, THREES),
        ("grpo with gmpo", 1, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo with htpo", 2, THREES),
        ("grpo with htpo", 2, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo with hapo", 1, ["--train.max_tokens_per_gpu", "999", "--actor.backend", "megatron"]),
        ("gtpo with a guide", 2, THREES),
        ("gtpo with a guide", 2, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo with rescues", 2, THREES),
        ("grpo with rescues", 1, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("gtpo in groups", 2, [*THREES, *SHARED]),
        ("gtpo in groups", 2, [*BY_TOKENS, *SHARED, "--actor.backend", "megatron"]),
        ("gtpo in groups", 1, [*THREES, *SHARED, "--actor.gradient_checkpointing_enable"]),
        ("grpo_s in groups", 2, [*BY_TOKENS, *SHARED, "--ds.zero_stage", "3"]),
        ("critic in groups", 2, [*THREES, *SHARED]),
    ],
    ids=str,
)
def test_a_step_does_not_depend_on_how_its_rows_are_split(
    name: str, processes: int, argv: list[str], actor_model: str, pools: dict[int, RankPool], whole: dict[str, Any]
) -> None:
    """Gradient norms and all metrics agree in bf16; with learning rate 0, all rounds start from the same weights."""
    backend = "megatron" if "megatron" in argv else "deepspeed"
    for found in pools[processes].run(run_rounds, backend, actor_model, [*COMMON, *ESTIMATORS[name], *argv], ROUNDS):
        for i, (ours, theirs) in enumerate(zip(found, whole[name], strict=True)):
            assert set(ours) == set(theirs), i
            for metric, value in theirs.items():
                if metric != names.TOKENS_COMPUTED:
                    assert ours[metric] == pytest.approx(value, rel=0.012, abs=0.003), (i, metric)
            # Padded to the longest, packed, or packed with the prompts of a micro-batch once.
            computed, of_rows = (ours[metric] for metric in (names.TOKENS_COMPUTED, names.TOKENS_ROWS))
            shared = SHARED[0] in argv
            assert (computed < of_rows) == (shared and i < 3)
            assert (computed > of_rows) == (not shared and argv[:2] == THREES and i < 3)


def test_the_rounds_can_tell(whole: dict[str, Any]) -> None:
    """Something is filtered, and a short round differs from a whole one."""
    for name in ("gtpo", "grpo_s", "gtpo with a guide"):
        assert 0 < whole[name][0]["is_filter_ratio"] < 1
    assert 0 < whole["grpo with htpo"][0]["ppo_clip_ratio"] < 1, "tokens whose loss is left out"
    for name, rescued in (("gtpo with a guide", None), ("grpo with rescues", 4 / 16)):
        first = whole[name][0]
        assert first[names.GUIDE_ROWS] == pytest.approx(5 / 16) and first.get(names.RESCUE_ROWS) == rescued
        assert 0 < first[names.GUIDE_TRUNCATED] < 5 / 16 + (rescued or 0)
        assert first["ppo_kl"] == pytest.approx(0, abs=1e-3), "over the policy's rows, where it has not moved"
    for rounds in whole.values():
        full, short, again, _ = (r.get("actor_grad_norm", r.get("critic_grad_norm")) for r in rounds)
        assert again == pytest.approx(full, rel=0.01) and short != pytest.approx(full, rel=0.03)


@pytest.mark.parametrize(
    ("name", "processes", "argv"),
    [
        ("gtpo", 2, THREES),
        ("gtpo", 2, [*BY_TOKENS, "--actor.backend", "megatron"]),
        ("grpo_s", 1, BY_TOKENS),
        ("grpo", 1, THREES),
        ("gspo", 1, [*BY_TOKENS, "--actor.backend", "megatron"]),
    ],
    ids=str,
)
def test_a_dump_gets_the_ratio_of_every_token_and_what_was_clipped(
    name: str, processes: int, argv: list[str], actor_model: str, pools: dict[int, RankPool]
) -> None:
    """It gets them for its rows over two optimizer steps, from the estimator's loss and from upstream's, both of which
    decide by the token or by the row."""
    flags = ESTIMATORS | {"gspo": ["--algo.preset", "grpo", "--actor.policy_loss_type", "gspo"]}
    low, high = 0.9, 1.15
    common = [*COMMON, *flags[name][:2], *flags[name][2:][: 2 * (name == "gspo")], "--train.batch_size", "8"]
    common += ["--actor.eps_clip_low_high", f"{1 - low}", f"{high - 1}", *argv]
    backend = "megatron" if "megatron" in argv else "deepspeed"
    found = pools[processes].run(run_ratios, backend, actor_model, common, LENGTHS)
    rows = {row: seen for _, theirs in found for row, seen in theirs.items()}
    assert sorted(rows) == [row for row in range(len(LENGTHS)) if row % 4]
    agreed = total = 0
    for seen in rows.values():
        acts = torch.arange(len(seen["ratio"])) >= 2  # after the prompt
        torch.testing.assert_close(seen["ratio"].log(), seen["shift"], atol=0.03, rtol=0)
        decides = seen["ratio"]
        if name == "grpo_s":
            decides = decides[acts].mean().expand_as(decides)
        elif name == "gspo":
            decides = decides.log()[acts].mean().exp().expand_as(decides)
        clipped = torch.where(seen["advantages"] > 0, decides > high, decides < low) & acts
        agreed += int((clipped == seen["clipped"]).sum())
        total += len(clipped)
    assert agreed == total and 0 < sum(int(seen["clipped"].sum()) for seen in rows.values()) < total


@pytest.mark.parametrize("argv", [THREES, BY_TOKENS], ids=["threes", "by tokens"])
def test_several_steps_and_epochs_train_alike(argv: list[str], actor_model: str, pools: dict[int, RankPool]) -> None:
    """Two epochs of two optimizer steps, at a learning rate that moves the second round's numbers.

    Nothing is clipped or left out, as bf16's rounding would decide that differently in other micro-batches.
    """
    more = [
        "--train.batch_size",
        "8",
        "--train.max_epochs",
        "2",
        "--actor.adam.lr",
        "2e-4",
        "--actor.lr_warmup_ratio",
        "0",
    ]
    common = [*COMMON, "--algo.advantage.estimator", "gtpo", *ENTROPY, "--actor.eps_clip_low_high", "0.99", "9", *more]
    by_tokens = "--train.dynamic_batch_enable" in argv
    reference = [*BY_TOKENS[:1], "--train.max_tokens_per_gpu", "9999"] if by_tokens else WHOLE  # one micro-batch
    expected = pools[1].run(run_rounds, "deepspeed", actor_model, [*common, *reference], [LENGTHS] * 2)[0]
    found = pools[1].run(run_rounds, "deepspeed", actor_model, [*common, *argv], [LENGTHS] * 2)[0]
    assert abs(expected[1]["policy_loss"] - expected[0]["policy_loss"]) > 1e-3
    for i in range(2):
        for metric in expected[i].keys() - {names.TOKENS_COMPUTED}:
            assert found[i][metric] == pytest.approx(expected[i][metric], rel=0.02, abs=0.005), (i, metric)


def test_the_routers_loss_counts_rows_and_not_replicas(
    actor_model: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """One of two replicas has no row."""
    model = make_checkpoint(tmp_path / "moe", "qwen3_moe", 64)
    for file in Path(actor_model).glob("tokenizer*"):
        shutil.copy(file, model)
    argv = ["--algo.advantage.estimator", "gtpo", "--actor.aux_loss_coef", "100", "--train.batch_size", "6"]
    norms = [pools[n].run(run_rounds, "deepspeed", str(model), argv, [[9]])[0][0]["actor_grad_norm"] for n in (1, 2)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01) and norms[0] > 10


def test_weights_gathered_together_are_all_there(actor_model: str, pools: dict[int, RankPool]) -> None:
    """Under ZeRO 3, as a model is loaded that has several weights in a module, such as biases or experts."""
    argv = ["--algo.advantage.estimator", "gtpo", "--ds.zero_stage", "3"]
    assert pools[2].run(run_gathers, actor_model, argv) == [[True] * 5] * 2


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_the_average_of_the_weights_follows_small_steps(
    stage: str, actor_model: str, pools: dict[int, RankPool]
) -> None:
    """A step moves it by less than bfloat16 can tell, and so it moves by the sum of many."""
    argv = ["--algo.advantage.estimator", "gtpo", "--train.enable_ema", "--ds.zero_stage", stage]
    argv += ["--actor.adam.lr", "1e-4", "--actor.lr_warmup_ratio", "0", "--train.batch_size", "2"]
    for error, distance in pools[2].run(run_averages, actor_model, argv, 10):
        assert error < 0.01 * distance and distance > 1e-5


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_average_of_a_run_that_went_on_begins_with_the_checkpoints_weights(
    stage: str, actor_model: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """The flag is new: the checkpoint has no average."""
    argv = ["--algo.advantage.estimator", "gtpo", "--ds.zero_stage", stage, "--train.batch_size", "2"]
    argv += ["--actor.adam.lr", "1e-2", "--actor.lr_warmup_ratio", "0", "--ckpt.path", str(tmp_path)]
    pools[2].run(run_rounds, "deepspeed", actor_model, argv, [LENGTHS[:4]], 1)
    argv += ["--ckpt.load_enable", "--train.enable_ema"]
    for error, distance in pools[2].run(run_averages, actor_model, argv, 1):
        assert error < 0.01 * distance and distance > 1e-5


def test_the_first_step_is_as_long_without_zero(actor_model: str, pools: dict[int, RankPool]) -> None:
    """Adam's is nearly the learning rate in every weight, if it is the first that Adam counts."""
    argv = ["--algo.advantage.estimator", "gtpo", "--train.enable_ema", "--train.ema_beta", "0", "--train.batch_size"]
    argv += ["2", "--actor.adam.lr", "1e-3", "--actor.lr_warmup_ratio", "0", "--ds.zero_stage"]
    lengths = [pools[1].run(run_averages, actor_model, [*argv, stage], 1)[0][1] for stage in ("0", "2")]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.02) and lengths[1] > 5e-4


EMA = ["--algo.advantage.estimator", "gtpo", "--train.enable_ema", "--train.ema_beta", "0.5"]


MUON = ["--algo.advantage.estimator", "gtpo", "--actor.optim", "muon"]


@pytest.mark.parametrize(
    "argv",
    [EMA, [*EMA, "--ds.zero_stage", "3"], ["--algo.advantage.estimator", "gae"], MUON],
    ids=["2", "3", "critic", "muon"],
)
def test_a_resumed_actor_trains_on_bit_by_bit(
    argv: list[str], actor_model: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """This includes weights, optimizer, schedule, order of rows, dropout, and the moving average of the weights."""
    model = shutil.copytree(actor_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    argv = [*argv, *THREES, "--train.batch_size", "6", "--train.max_epochs", "2"]
    argv += ["--ckpt.path", str(tmp_path / "saved"), "--actor.adam.lr", "1e-3", "--critic.adam.lr", "1e-3"]
    argv += ["--actor.muon.lr", "1e-3"]
    whole = pools[2].run(run_rounds, "deepspeed", str(model), argv, [LENGTHS[:12]] * 3, 2)
    actors = tmp_path / "saved" / "_actor" / "global_step2"  # a critic resumes only beside one
    if not actors.exists():
        actors.mkdir(parents=True)
        write_manifest(actors, {})
    resumed = pools[2].run(run_rounds, "deepspeed", str(model), [*argv, "--ckpt.load_enable"], [LENGTHS[:12]])
    assert resumed == [statuses[2:] for statuses in whole]
    argv += ["--ckpt.load_enable", "--actor.adam.lr", "1e-5", "--critic.adam.lr", "1e-5", "--actor.muon.lr", "1e-5"]
    slower = pools[2].run(run_rounds, "deepspeed", str(model), argv, [LENGTHS[:12]])
    for (slow,), (as_saved,) in zip(slower, resumed, strict=True):
        [name] = [name for name in slow if name.endswith("_lr")]
        assert slow[name] == pytest.approx(as_saved[name] / 100)
        assert slow != as_saved | {name: slow[name]}  # the first of the steps has that rate too


# ── Entries whose number is not a multiple of the replicas ──


class Handler:
    """Stands for a Ray actor: answers with what it was given, and counts the entries that it computed."""

    def __init__(self) -> None:
        self.computed = 0
        self.execute_batch = SimpleNamespace(remote=self._answer)
        self.__ray_call__ = SimpleNamespace(remote=lambda call, *args: call(self._itself, *args))
        self._itself = SimpleNamespace(execute_batch=self._answer)

    def _answer(self, method: str, columns: dict[str, list[int]], start: int, end: int) -> list[int]:
        self.computed += end - start
        return columns["x"][start:end]


@pytest.mark.parametrize("duplicates", [1, 2])
def test_a_replica_with_fewer_entries(duplicates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in every forward, whose results are the entries' alone; one without entries trains on none."""
    from openrlhf.trainer.ray import launcher

    for module in (launcher, dispatch):
        monkeypatch.setattr(module, "ray", SimpleNamespace(put=lambda value: value))
    group = object.__new__(ActorGroup)
    group.duplicate_actors = duplicates
    for entries in (1, 3, 4, 5, 6, 8, 11):
        values = list(range(entries))
        group._actor_handlers = [Handler() for _ in range(4 * duplicates)]
        if entries < 4:
            with pytest.raises(ValueError, match="Insufficient batch size"):
                RayActorGroup.async_run_method_batch(group, "score", x=values)
        for method in ("forward", "score"):
            for handler in group._actor_handlers:
                handler.computed = 0
            given = group.async_run_method_batch(method, x=values)
            assert [x for part in given[::duplicates] for x in part] == values
            computed = [handler.computed for handler in group._actor_handlers]
            most = math.ceil(entries / 4)
            assert max(computed) == most and (method == "score" or min(computed) == most)


def long_tailed(rows: int, seed: int) -> list[int]:
    """Token counts of rows whose responses are log-normal and cut off at 4096, with prompts of similar length."""
    generator = np.random.default_rng(seed)
    responses = np.minimum(4096, generator.lognormal(np.log(683), 0.9, rows)).astype(int)
    return (responses + generator.integers(200, 400, rows)).tolist()


def steps_of(buffers: list[np.ndarray], order: RowOrder, epochs: int = 1) -> list[list[list[int]]]:
    """The rows of each optimizer step, by replica, as the replicas themselves find them."""
    args = SimpleNamespace(train=SimpleNamespace(batch_size=order.batch_size, max_epochs=epochs))
    total = sum(map(len, buffers))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(optimizer_steps, "all_reduce", lambda tensor, group: tensor.fill_(total))
        of_replica = []
        for buffer in buffers:
            shuffle = np.random.default_rng(order.seed)
            steps = optimizer_steps.optimizer_steps(len(buffer), args, None, torch.device("cpu"), shuffle)  # type: ignore[arg-type]
            of_replica.append([buffer[places].tolist() for places in steps])
    return [list(step) for step in zip(*of_replica, strict=True)]


def imbalance(step: list[list[int]], lengths: list[int]) -> float:
    """By what fraction the heaviest replica's tokens exceed the mean replica's."""
    tokens = [sum(lengths[row] for row in rows) for rows in step]
    return max(tokens) * len(tokens) / sum(tokens) - 1


@pytest.mark.parametrize(
    ("prompts", "batch_size", "epochs", "steps"),
    [(10, 6, 1, 5 + 5), (11, 6, 2, 2 * 2 * (5 + 1)), (8, 64, 1, 4 + 4), (3, 6, 1, 2), (9, 5, 3, 2 * 3 * (4 * 2 + 1))],
)
def test_the_schedule_is_of_the_steps_that_are_made(prompts: int, batch_size: int, epochs: int, steps: int) -> None:
    """Two episodes of rollouts of 2 prompts with 6 rows each; the last rollout of an episode may have one prompt."""
    order = RowOrder(batch_size, [1])
    rollouts = [12] * (prompts // 2) + [6] * (prompts % 2)
    made = sum(len(steps_of([np.arange(rows)], order, epochs)) for rows in 2 * rollouts)
    train = SimpleNamespace(batch_size=batch_size, max_epochs=epochs, num_episodes=2)
    for size in (2, 4):  # where upstream draws fewer prompts than a rollout may have, it trains on those
        rollout = SimpleNamespace(batch_size=size, vllm_generate_batch_size=2, n_samples_per_prompt=6)
        assert count_all_steps(SimpleNamespace(rollout=rollout, train=train), prompts) == made


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_replicas_have_as_many_tokens_in_every_optimizer_step(replicas: int) -> None:
    """16 steps of 128 rows, each with the same rows as without dealing: by how much the heaviest replica exceeds the
    mean one, as docs/openrlhf.md has it (-s prints it)."""
    lengths, order = long_tailed(2048, seed=replicas), RowOrder(128, [7, 48])
    chunks = np.array_split(np.arange(2048), replicas)
    before, after = steps_of(chunks, order), steps_of(deal_rows(lengths, replicas, order), order)
    assert len(after) == 16
    for was, step in zip(before, after, strict=True):
        assert sorted(sum(step, [])) == sorted(sum(was, []))
        assert {len(rows) for rows in step} == {128 // replicas}
    by_count, by_tokens = ([imbalance(step, lengths) for step in steps] for steps in (before, after))
    print(f"{replicas} replicas: {np.mean(by_count):.1%} by count, {np.mean(by_tokens):.2%} by tokens", end=", ")
    print(f"at most {max(by_tokens):.2%}")
    assert np.mean(by_count) > 0.04 and max(by_tokens) < 0.02


@pytest.mark.parametrize("rows", [2048, 2045])
def test_every_epoch_has_the_balanced_steps_in_an_order_of_its_own(rows: int) -> None:
    lengths, order = long_tailed(rows, seed=rows), RowOrder(128, [7, 48])
    steps = steps_of(deal_rows(lengths, 4, order), order, epochs=3)
    epochs = [steps[first : first + len(steps) // 3] for first in range(0, len(steps), len(steps) // 3)]
    assert len(epochs) == 3 and epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        assert sorted(epoch) == sorted(epochs[0]) and sorted(sum(sum(epoch, []), [])) == list(range(rows))
        assert max(imbalance(step, lengths) for step in epoch) < 0.02


def test_rows_that_replicas_cannot_share_evenly_are_all_dealt_once() -> None:
    for rows in (5, 16, 127, 129, 300):
        lengths, order = long_tailed(rows, seed=rows), RowOrder(128, [0, 0])
        dealt = deal_rows(lengths, 4, order)
        assert sorted(np.concatenate(dealt)) == list(range(rows))
        assert [len(one) for one in dealt] == [len(one) for one in np.array_split(np.arange(rows), 4)]


@pytest.mark.parametrize(("samples", "size"), [(8, 128), (5, 128), (16, 64)])
def test_a_group_goes_to_one_replica(samples: int, size: int) -> None:
    """Each step has the rows that it had; of groups that are whole in a step, no more than a replica's last one is
    cut, and replicas have about as many tokens as are computed."""
    generator = np.random.default_rng(samples)
    prompts = [Prompt(bytes([number]), 200 + number) for number in range(64) for _ in range(samples)]
    lengths = [prompt.length + int(generator.integers(20, 200)) for prompt in prompts]
    rows, order = len(prompts), RowOrder(len(prompts) if size == 128 else 512, [3], True)
    before = steps_of(np.array_split(np.arange(rows), 4), order)
    after = steps_of(deal_rows(lengths, 4, order, prompts), order)
    for was, step in zip(before, after, strict=True):
        assert sorted(sum(step, [])) == sorted(sum(was, []))
        assert [len(mine) for mine in step] == [len(mine) for mine in was]
        in_step = {prompts[row] for row in sum(step, [])}
        parts = sum(len({prompts[row] for row in mine}) for mine in step)
        assert parts <= len(in_step) + 3
        tokens = [computed_tokens([lengths[r] for r in mine], [prompts[r] for r in mine]) for mine in step]
        assert max(tokens) < 1.1 * np.mean(tokens)


@pytest.mark.parametrize("order", [RowOrder(8, [0, 0]), None])
def test_what_replicas_append_is_dealt_by_tokens(order: RowOrder | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks of each of two replicas get the replica's rows, in micro-batches; rows in their own order stay."""
    from openrlhf.trainer.ray import launcher

    from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
    from tests.support.rollouts import arguments, maker, rollout

    monkeypatch.setattr(launcher, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr(dispatch, "ray", SimpleNamespace(get=lambda value: value))
    args = arguments("--algo.advantage.estimator", "gtpo", "--rollout.micro_batch_size", "2")
    args.actor.num_gpus_per_node = 2
    batch = rollout(prompts=4, samples=4)
    samples = maker(ExperienceMaker, args, batch, monkeypatch).split(batch.rows())
    lengths = [int(length) for one in samples for length in one.total_length]
    trainer = SimpleNamespace(row_order=lambda: order)
    group = object.__new__(ActorGroup)
    group.duplicate_actors = 2
    group._actor_handlers = [
        SimpleNamespace(
            __ray_call__=SimpleNamespace(remote=lambda call: call(SimpleNamespace(trainer=trainer))),
            execute_batch=SimpleNamespace(remote=lambda method, columns, *part: columns["experience"]),
        )
        for _ in range(4)
    ]
    given = group.async_run_method_batch("append", experience=samples)
    assert len(given) == 4 and given[0] is given[1] and given[2] is given[3]
    found = [[int(length) for one in entries for length in one.total_length] for entries in given[::2]]
    expected = np.array_split(np.arange(16), 2) if order is None else deal_rows(lengths, 2, order)
    assert found == [[lengths[row] for row in rows] for rows in expected]


def test_rows_are_dealt_evenly() -> None:
    """Each of 4 replicas gets the same number of micro-batches, none above the given size (or above two rows for size
    1 if rows are not a multiple of the replicas); fewer rows than replicas go one by one."""
    from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
    from tests.support.rollouts import arguments, maker, rollout

    with pytest.MonkeyPatch.context() as monkeypatch:
        for prompts, size in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 4)):
            args = arguments("--algo.advantage.estimator", "gtpo", "--rollout.micro_batch_size", f"{size}")
            args.actor.num_gpus_per_node = 4
            batch = rollout(prompts=prompts, samples=3)
            samples = maker(ExperienceMaker, args, batch, monkeypatch).split(batch.rows())
            assert [row for one in samples for row in one.index] == list(range(3 * prompts))
            assert len(samples) % 4 == 0 or len(samples) == 3 * prompts < 4
            assert max(len(one.index) for one in samples) <= (2 if size == 1 and 3 * prompts % 4 else size)
            np.testing.assert_equal([len(one.sequences) for one in samples], [len(one.index) for one in samples])


# ── Numbers that are not finite ──

GTPO = ["--algo.advantage.estimator", "gtpo", "--algo.kl.init_coef", "0"]
GRPO = ["--algo.preset", "grpo", "--algo.kl.estimator", "k1"]
MEGATRON = ["--actor.backend", "megatron"]
TRAINS = ["--actor.adam.lr", "1e-2", "--critic.adam.lr", "1e-2", "--train.micro_batch_size", "2"]
TRAINS += ["--train.max_bad_steps", "4"]


def zero(stage: int, *more: str) -> list[str]:
    return ["--ds.zero_stage", str(stage), *more]


@pytest.mark.parametrize(
    ("wrongs", "argv", "fused"),
    [
        (["gradient"], [*GTPO, *zero(0)], False),
        (["gradient"], [*GTPO, *zero(0)], True),
        (["gradient", "log_probs"], [*GTPO, *zero(1, "--ds.grad_accum_dtype", "fp32")], False),
        (["gradient", "loss", "log_probs"], [*GRPO, *zero(2)], False),
        (["gradient"], [*GTPO, *zero(3)], False),
        (["gradient"], ["--algo.advantage.estimator", "gae"], False),
        (["gradient", "loss", "log_probs"], [*GRPO, *MEGATRON], False),
        (["gradient", "log_probs"], [*GTPO, *MEGATRON, "--no-megatron.use_distributed_optimizer"], False),
        (["gradient"], [*GTPO, *MEGATRON, "--megatron.tensor_model_parallel_size", "2"], False),
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_leaves_no_trace(
    wrongs: list[str], argv: list[str], fused: bool, actor_model: str, pools: dict[int, RankPool]
) -> None:
    """Weights, masters, moments and counts are bitwise those of a run without it, right after it and a step later; one
    of two ranks has the bad row."""
    backend = "megatron" if "megatron" in argv else "deepspeed"
    model = "critic" if "gae" in argv else "actor"
    with_them, without = (
        pools[2].run(run_poisoned, backend, actor_model, [*TRAINS, *argv], [None, *wrong, None], fused)
        for wrong in (wrongs, [])
    )
    for (first, *skipped, last), (_, second) in zip(with_them, without, strict=True):
        for status, state in skipped:
            assert not math.isfinite(status[f"{model}_grad_norm"]) and status[f"{model}_bad_steps"] == 1
            assert_the_same(state, first[1])
        assert len(skipped) == len(wrongs) and last[0][f"{model}_bad_steps"] == 0
        assert last[0][f"{model}_grad_norm"] == second[0][f"{model}_grad_norm"] > 0
        assert_the_same(last[1], second[1])
        assert any(not torch.equal(first[1][name], tensor) for name, tensor in last[1].items() if "weight" in name)


@pytest.mark.parametrize("argv", [zero(1, "--ds.grad_accum_dtype", "fp32"), MEGATRON], ids=str)
def test_a_step_with_nothing_to_learn_from_is_a_good_one(
    argv: list[str], actor_model: str, pools: dict[int, RankPool]
) -> None:
    """As if all rewards of its groups are equal."""
    backend = "megatron" if "megatron" in argv else "deepspeed"
    rounds = [None, "nothing", None]
    [[_, (status, _), (last, _)]] = pools[1].run(run_poisoned, backend, actor_model, [*TRAINS, *GTPO, *argv], rounds)
    assert status["actor_grad_norm"] == status["actor_bad_steps"] == last["actor_bad_steps"] == 0
    assert last["actor_grad_norm"] > 0


def assert_the_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_too_many_in_a_row_and_a_weight_that_is_not_finite_stop_training(
    backend: str, actor_model: str, pools: dict[int, RankPool]
) -> None:
    """The last of two ranks has what is wrong: both stop or, if it is a weight, the one that holds it."""
    argv = [*TRAINS, *GTPO, "--actor.backend", backend, "--train.max_bad_steps", "2"]
    with pytest.raises(AssertionError) as stopped:
        pools[2].run(run_poisoned, backend, actor_model, argv, [None, "log_probs", None, "log_probs", "log_probs"])
    sentence = (
        "TrainingStopped: Skipped the actor's optimizer step after 2 good ones: the gradient, policy_loss was not "
        "finite, the last of 2 in a row (--train.max_bad_steps). No weight has changed."
    )
    assert str(stopped.value).count(sentence) == 2
    with pytest.raises(AssertionError, match="TrainingStopped: The actor's weight .* is not finite"):
        pools[2].run(run_poisoned, backend, actor_model, argv, [None, "weight"])


def test_what_fills_up_the_last_ranks_part_of_a_weight_is_no_weight(actor_model: str) -> None:
    """Three ranks share no power of 2 evenly. DeepSpeed leaves the rest as it finds the memory, which torch's
    deterministic mode fills with NaN."""
    argv = [*TRAINS, *GTPO, *zero(3)]
    with RankPool(3) as three:
        for rounds in three.run(run_poisoned, "deepspeed", actor_model, argv, ["padding", None]):
            for status, _ in rounds:
                assert status["actor_bad_steps"] == 0 and status["actor_grad_norm"] > 0


@pytest.mark.parametrize("level", ["token", "seq"])
def test_what_compares_the_policy_with_itself_is_of_its_own_rows(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide's rows, where these metrics are 0, do not count, however they are dealt; for other metrics they do."""
    from tests.support.rollouts import arguments

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda all_of, mine, group: all_of.__setitem__(0, mine)
    )
    metrics = optimizer_steps.StepMetrics(arguments("--algo.advantage.is_correction_level", level))
    own = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])  # by micro-batch and row
    for wholes in own:
        rows = SimpleNamespace(action_mask=torch.ones(3, 4), info={names.OFF_POLICY_ROWS: 1 - wholes})
        means = wholes if level == "seq" else wholes.mean()
        metrics.add({"ppo_kl": wholes.mean(), "is_filter_ratio": means, "ppo_clip_ratio": wholes.mean()}, rows)
    found = metrics.averages(1, reports=True)
    assert found == pytest.approx({"ppo_kl": 1, "is_filter_ratio": 1, "ppo_clip_ratio": 1 / 3})


def test_fp16_lives_by_skipping_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how DeepSpeed finds its loss scale; it ends the run itself if there is none."""
    from tests.support.rollouts import arguments

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda all_of, mine, group: all_of.__setitem__(0, mine)
    )
    args = arguments("--ds.param_dtype", "fp16")
    steps = optimizer_steps.BadSteps("actor", args)
    assert all(steps.add(math.inf, 0, optimizer_steps.StepMetrics(args)) for _ in range(20))


def test_muon_on_a_cpu_compiles_no_adam(actor_model: str, pools: dict[int, RankPool]) -> None:
    """Nor does anything else that the actors' own processes run here: ``steps_program`` asserts it."""
    [[(status, _)]] = pools[1].run(
        run_poisoned, "deepspeed", actor_model, [*TRAINS, *GTPO, "--actor.optim", "muon"], [None]
    )
    assert status["actor_bad_steps"] == 0 and status["actor_grad_norm"] > 0


# ── Without an old-policy forward ──

PAIRS = ["--rollout.micro_batch_size", "2", "--train.micro_batch_size", "2", "--train.max_tokens_per_gpu", "16"]
PAIRS += ["--actor.adam.lr", "1e-3", "--actor.lr_warmup_ratio", "0"]
SAMPLER = ["--rollout.entropy", "sampler", "--rollout.entropy_audit_steps", "0"]
KL_LOSS = ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.1"]
NO_KL = ["--algo.kl.init_coef", "0"]
LEVEL = "--algo.advantage.is_correction_level"


@pytest.mark.parametrize(
    ("backend", "argv", "forwards"),
    [
        *itertools.product(
            ["deepspeed", "megatron"],
            [
                ["gtpo", *NO_KL],
                ["grpo_s", *NO_KL, LEVEL, "seq"],
                ["gtpo", *KL_LOSS],
                ["gtpo", *KL_LOSS, "--algo.kl.unbiased_gradient", LEVEL, "token"],
                ["group_norm", *NO_KL, "--logger.entropy_enable"],
            ],
            [0],
        ),
        ("deepspeed", ["gtpo", "--algo.kl.init_coef", "0.1"], 1),
        ("deepspeed", ["gtpo", *NO_KL, "--train.batch_size", "4"], 1),
    ],
    ids=str,
)
def test_a_whole_step_without_an_old_policy_forward_is_the_one_with_it(
    backend: str, argv: list[str], forwards: int, actor_model: str, pools: dict[int, RankPool]
) -> None:
    """If the sampler says what the actor would, status, weights and optimizer are the same bit by bit after one
    optimizer step. KL as a reward, and several optimizer steps, still ask the actor."""
    argv = [*PAIRS, "--train.batch_size", "8", "--algo.advantage.estimator", *argv]
    status, state, asked = pools[1].run(run_whole_step, backend, actor_model, argv)[0]
    assert asked == 1 and status["actor_grad_norm"] > 0.01
    without, found, asked = pools[1].run(run_whole_step, backend, actor_model, [*argv, *SAMPLER])[0]
    assert asked == forwards and status.items() <= without.items()
    assert_the_same(found, state)


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_an_engine_that_missed_an_update_shows_in_the_audit(
    backend: str, actor_model: str, pools: dict[int, RankPool]
) -> None:
    """The gate closes, and the step is the same as with the actor's entropies."""
    argv = [*PAIRS, "--train.batch_size", "8", "--algo.advantage.estimator", "gtpo", *NO_KL]
    sampler = [*argv, *SAMPLER[:2], "--rollout.entropy_audit_gate", "0.05"]
    fresh, _, _ = pools[1].run(run_whole_step, backend, actor_model, sampler)[0]
    assert fresh["rollout/entropy_diff_mean"] == 0 and fresh["rollout/entropy_of_sampler"] == 1
    stale, found, asked = pools[1].run(run_whole_step, backend, actor_model, sampler, 0.05)[0]
    assert stale["rollout/entropy_diff_mean"] > 0.05 and stale["rollout/log_prob_diff_mean"] > 0.05
    assert stale["rollout/entropy_of_sampler"] == 0 and asked == 1
    status, state, _ = pools[1].run(run_whole_step, backend, actor_model, argv, 0.05)[0]
    assert status.items() <= stale.items()
    assert_the_same(found, state)


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_log_probs_of_the_sampler_hold_several_optimizer_steps(
    backend: str, actor_model: str, pools: dict[int, RankPool]
) -> None:
    """Each step has a ratio of 1 to itself, and the correction weighs by the distance to the policy that sampled."""
    argv = [*PAIRS, "--train.batch_size", "4", "--algo.advantage.estimator", "gtpo", *NO_KL, LEVEL, "token"]
    held, _, asked = pools[1].run(run_whole_step, backend, actor_model, [*argv, *SAMPLER])[0]
    assert asked == 1 and abs(held["ppo_kl"]) > 1e-4
    free, _, asked = pools[1].run(
        run_whole_step, backend, actor_model, [*argv, *SAMPLER, "--rollout.log_probs", "sampler"]
    )[0]
    assert asked == 0 and free["ppo_kl"] == free["ppo_clip_ratio"] == 0
    assert abs(free["vllm_kl"] - held["vllm_kl"]) > 1e-4


def test_deepspeeds_tensor_parallelism_sends_whole_weights(actor_model: str, pools: dict[int, RankPool]) -> None:
    """Each parameter is sent as announced and as the checkpoint has it. This must be a pool's last test: the split
    stays on for a process's life."""
    from transformers import AutoModelForCausalLM

    whole = dict(AutoModelForCausalLM.from_pretrained(actor_model, dtype=torch.bfloat16).named_parameters())
    argv = [*GTPO, "--ds.tensor_parallel_size", "2"]
    for sent in pools[2].run(sent_weights, actor_model, argv):
        assert_the_same(sent, whole)
