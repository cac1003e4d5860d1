"""The warnings that the controller adds to a step's log, and the standard errors that it adds to an evaluation."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from rollouts import arguments

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter
from openrlhf_gtpo.training.controller import trainer
from openrlhf_gtpo.training.controller.metrics import eval_metrics, held_out_statistics, step_warnings
from openrlhf_gtpo.training.controller.spikes import Spikes
from openrlhf_gtpo.training.controller.trainer import EntropyTrainer
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit

LEARNS = {
    names.GROUPS_UNIFORM: 15.0,
    names.GROUPS_TOTAL: 16.0,
    names.REWARD_MEAN: 0.25,
    "group_reward_std": 0.1,
    "rollout/truncated_rate": 0.85,
    "rollout/num_samples": 64.0,
}
ALL_FAIL = {names.GROUPS_UNIFORM: 16.0}  # with partial credit: rewards differ
EQUAL = ALL_FAIL | {"group_reward_std": 0.0}
OUTCOME = torch.tensor([0.0, 1.0, 0.25] * 16)


def warnings(estimator: str, status: dict[str, float], *flags: str, outcome: torch.Tensor = OUTCOME) -> str:
    args = arguments("--algo.advantage.estimator", estimator, *flags)
    return " ".join(step_warnings(LEARNS | status, outcome, args, entropy_credit(args)).values())


@pytest.mark.parametrize(
    ("estimator", "status", "flags", "sentence"),
    [
        ("gtpo", {}, [], None),
        ("group_norm", {}, [], None),
        ("group_norm", ALL_FAIL, [], None),
        ("group_norm", {"rollout/truncated_rate": 1.0, "group_reward_std": math.nan}, [], "64 of 64 responses"),
        ("reinforce", EQUAL, [], None),  # compares no rewards within a group
        ("gtpo", EQUAL, ["--algo.gtpo.shape_uniform_groups"], None),
        (
            "gtpo",
            ALL_FAIL,
            [],
            "in each of the 16 groups the 4 responses all succeed or all fail (--algo.gtpo.success_threshold 1), with "
            "a mean reward of 0.250, so nothing is learned; check the reward, or give --rollout.n_samples_per_prompt "
            "more than 4.",
        ),
        ("grpo_s", EQUAL, ["--algo.grpo_s.success_threshold", "0.5"], "(--algo.grpo_s.success_threshold 0.5)"),
        ("forking_tokens", ALL_FAIL, [], None),
        ("forking_tokens", EQUAL, [], "in each of the 16 groups the 4 rewards are equal, with a mean reward of 0.250"),
        ("rloo", EQUAL, [], "in each of the 16 groups the 4 rewards are equal, with a mean reward of 0.250"),
        (
            "gtpo",
            {"rollout/truncated_rate": 0.90625},
            ["--rollout.max_new_tokens", "32"],
            "58 of 64 responses were cut off at --rollout.max_new_tokens 32 before their end; give it more.",
        ),
        ("gtpo", {"rollout/truncated_rate": 0.95}, ["--data.max_len", "512"], "61 of 64 responses were cut off at "
         "--data.max_len 512"),
    ],
)  # fmt: skip
def test_a_step_that_teaches_nothing_is_named_with_the_flag_that_helps(
    estimator: str, status: dict[str, float], flags: list[str], sentence: str | None
) -> None:
    found = warnings(estimator, status, *flags)
    assert found == "" if sentence is None else sentence in found


@pytest.mark.parametrize(
    ("estimator", "flags", "rewards", "sentence"),
    [
        ("gtpo", [], [0.1, 0.9, 0.5], "0 of 96 responses reach 1.0 (rewards 0.1 to 0.9), so none counts as a success; "
         "lower --algo.gtpo.success_threshold, or check the reward."),
        ("grpo_s", ["--algo.grpo_s.success_threshold", "0.5", "--algo.grpo_s.shape_uniform_groups"],
         [0.0, 0.49999997], "0 of 64 responses reach 0.5 (rewards 0.0 to 0.49999997)"),
        ("gtpo", [], [0.1, 0.7 + 0.2 + 0.1], "in each of the 16 groups"),  # a success
        ("gtpo", [], [0.2, 0.2], "in each of the 16 groups"),  # no threshold would part them
        ("group_norm", [], [0.1, 0.9], None),
        ("forking_tokens", [], [0.1, 0.9], None),  # only its metrics ask for successes
    ],
)  # fmt: skip
def test_rewards_that_never_reach_the_threshold_are_named_with_it(
    estimator: str, flags: list[str], rewards: list[float], sentence: str | None
) -> None:
    found = warnings(estimator, ALL_FAIL, *flags, outcome=torch.tensor(rewards * 32))
    assert found == "" if sentence is None else sentence in found


NO_AUDIT = SimpleNamespace(batches=0, closed=False)


def test_a_warning_is_printed_when_it_begins_and_written_as_long_as_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments("--algo.advantage.estimator", "gtpo")
    controller = object.__new__(EntropyTrainer)
    controller.args, controller.warnings, controller.failed_saves = args, {}, []
    controller.costs = SimpleNamespace(
        sampled=lambda samples: None, trained=lambda: None, begin=lambda: None, end=lambda: seconds, response_tokens=1
    )
    seconds = {"timing/generation": 0.5, "timing/ppo_train": 0.25}
    controller.experience_maker = SimpleNamespace(
        rescued=[], metrics={}, seconds={}, outcome=OUTCOME, credit=entropy_credit(args), audit=NO_AUDIT
    )
    controller.samples_generator = SimpleNamespace(at_end_of_episode=False, tokens=7)
    controller.metrics_writer = MetricsWriter(tmp_path / "metrics.jsonl")
    controller.heartbeat = None
    controller.kl_ctl, controller.spikes = SimpleNamespace(value=0.0), Spikes(0.0)
    steps = [{}, ALL_FAIL, ALL_FAIL | {"rollout/truncated_rate": 1.0}, ALL_FAIL, {}, EQUAL]
    upstream: Any = trainer._UpstreamTrainer
    monkeypatch.setattr(upstream, "train_step", lambda self, rows, step: (LEARNS | steps[step], step + 1))
    monkeypatch.setattr(upstream, "save_logs_and_checkpoints", lambda *arguments: None)
    for step in range(len(steps)):
        controller.save_logs_and_checkpoints(step + 1, controller.train_step([], step)[0])
    begun = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("Warning")]
    assert begun == ["Warning, from step 2 on", "Warning, from step 3 on", "Warning, from step 6 on"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held = [[name for name in row if name.startswith(names.WARNING_PREFIX)] for row in rows]
    assert [row[names.TOKENS_SAMPLED] for row in rows] == 6 * [7]
    rates = rows[0]["tokens_per_second/generation"], rows[0]["tokens_per_second/ppo_train"]
    assert rates == (14, 4), "tokens that a filter dropped were sampled too, and not trained on"
    groups, truncated = "warning/groups", "warning/truncated"
    assert held == [[], [groups], [groups, truncated], [groups], [], [groups]]


@pytest.mark.parametrize(
    ("saved", "evaluated", "made"), [(0, [], [0]), (4, [0], [4]), (4, [0, 4], []), (3, [0, 2], [])], ids=str
)
def test_an_evaluation_that_an_interruption_cut_off_is_made_when_the_run_goes_on(
    saved: int, evaluated: list[int], made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every second step is evaluated. By then the engines have the checkpoint's weights, which are sent once. A best
    checkpoint is kept, even if the interruption cut off only its saving."""
    args = arguments("--algo.advantage.estimator", "gtpo", "--eval.before_training", "--eval.dataset", "x")
    args.eval.steps, args.train.num_episodes = 2, 1
    controller = object.__new__(EntropyTrainer)
    controller.args, controller.eval_dataloader, controller.generate_kwargs = args, [], {}
    controller.costs = SimpleNamespace(begin=lambda: None)
    controller.wandb_logger = controller.critic_model_group = controller.vllm_engines = None
    purged: list[int] = []  # even before the first checkpoint: an earlier start may have made steps
    controller.tensorboard_logger = SimpleNamespace(go_on=purged.append, close=lambda: None)
    controller.kl_ctl, controller.heartbeat, controller.spikes = SimpleNamespace(value=0.5), None, Spikes(0.0)
    controller.engines = SimpleNamespace(watch=lambda: None, check=lambda: 0, bring_back=lambda policy: None)
    controller.experience_maker = SimpleNamespace(audit=NO_AUDIT, credit=None)
    controller.samples_generator, controller.failed_saves = SimpleNamespace(at_end_of_episode=False), []
    controller.best_eval_metric_key, controller.best_eval_metric_value = "", -math.inf
    controller.metrics_writer = MetricsWriter(tmp_path / "metrics.jsonl")
    controller.heartbeat = None
    for step in evaluated:
        controller.metrics_writer.write(names.KIND_EVAL, step, {"eval_x_pass1": 0.25})
    done: list[Any] = []
    upstream: Any = trainer._UpstreamTrainer
    monkeypatch.setattr(upstream, "broadcast_to_vllm", lambda self: done.append("weights"))

    def evaluate(self: Any, step: int, **generation: Any) -> dict[str, float]:
        done.append(step)
        return {"eval_x_pass1": 0.25}

    monkeypatch.setattr(EntropyTrainer, "evaluate", evaluate)
    saves: list[dict[str, Any]] = []

    def save(method_name: str, **of: Any) -> list[Any]:
        saves.append(of)
        return []

    controller.actor_model_group = SimpleNamespace(async_run_method=save)
    monkeypatch.setattr(trainer.ray, "get", lambda references: references)
    # The episode is over, so upstream's fit ends where steps would follow.
    states = {"global_step": saved, "episode": 1, "total_consumed_prompts": 64, "data_loader_state_dict": {}}
    states |= {"best_eval_metric_key": "eval_x_pass1", "best_eval_metric_value": 0.125}
    monkeypatch.setattr(EntropyTrainer, "init_checkpoint_states", lambda self: states)
    if saved == 0:  # a run of no steps, of this start or an earlier one, has trained nothing
        args.algo.dynamic_filtering_enable, args.algo.dynamic_filtering_range = True, [0.0, 1.0]
        with pytest.raises(TrainingStopped, match="No step was trained, .* none had .* a mean score between 0 and 1 "):
            controller.fit()
    else:
        controller.fit()
        said = capsys.readouterr().out
        assert (
            f"Warning: no step was trained after step {saved}, that of the checkpoint, with --train.num_episodes 1;"
            in said
        )
    assert done == ["weights"] * (saved > 0) + made and purged == [saved]
    assert [one["tag"] for one in saves] == ["best_global_step4"] * (saved == 4)
    expected = states | {"best_eval_metric_value": 0.25, "kl_coefficient": 0.5}
    assert all(expected.items() <= one["client_states"].items() and one["metric_value"] == 0.25 for one in saves)
    assert controller.best_eval_metric_value == (0.25 if saves else 0.125)


def test_the_standard_error_of_held_out_reward_is_over_questions() -> None:
    rewards = [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (math.nan, 1.0), (0.0, 1.0)]
    samples: Any = [
        SimpleNamespace(index=[number], rewards=torch.tensor([reward]))
        for number, pair in enumerate(rewards)
        for reward in pair
    ]
    # The means of x's questions are 0.5, 1 and 0, with a standard deviation of 0.5; y has one question.
    expected = {"eval_x_pass1_stderr": 0.5 / math.sqrt(3), "eval_z_pass1_stderr": math.nan}
    assert held_out_statistics(samples, list("xxxyzz"), 2) == pytest.approx(expected, nan_ok=True)


def test_a_question_of_two_data_sets_counts_in_both() -> None:
    """A data loader gives two rows at a time here; both sets have the question "a"."""
    loader: Any = [(["x", "x"], ["a", "b"], [0, 0], None), (["y"], ["a"], [0], None)]
    rewards = [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)]
    samples: Any = [
        Experience(index=[number], prompts=["aba"[number]], rewards=torch.tensor([reward]))
        for number, pair in enumerate(rewards)
        for reward in pair
    ]
    logs = eval_metrics(loader, samples, 2)
    expected = {"eval_x_pass2": 0.5, "eval_x_pass1": 0.25, "eval_y_pass2": 1.0, "eval_y_pass1": 1.0}
    assert logs == expected | {"eval_num_samples": 6}


def test_the_best_of_16_is_that_of_all_draws_from_a_questions_responses() -> None:
    rewards = [1.0, 0.5] + 15 * [0.0]
    samples: Any = [SimpleNamespace(index=[0], rewards=torch.tensor([reward])) for reward in rewards]
    # Each draw leaves out one of 17: the best in one draw, another one in the other 16.
    assert held_out_statistics(samples, ["x"], 17) == {"eval_x_pass16": pytest.approx((0.5 + 16 * 1.0) / 17)}
    assert held_out_statistics(samples[:16], ["x"], 16) == {}  # upstream reports this one
