"""The controller's loop: what it writes of its steps, and when it evaluates."""

import json
from pathlib import Path
from typing import Any

import pytest
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter
from openrlhf_gtpo.training.rollout.sampler import Sampler
from tests.support.controllers import Group, controller, run_arguments


def lines(folder: Path, kind: str = names.KIND_TRAIN) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_tokens_that_a_filter_dropped_were_sampled_and_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter lets through the odd prompts, 4 a step, and no step follows the last of them."""
    controller(monkeypatch, run_arguments(tmp_path, "--algo.dynamic_filtering_enable")).fit()
    rows = lines(tmp_path)
    assert len(rows) == 2 and 24 < sum(row[names.TOKENS_SAMPLED] for row in rows) <= 48
    for row in rows:
        assert row["tokens_per_second/ppo_train"] * row["timing/ppo_train"] == pytest.approx(12)
        sampled = row["tokens_per_second/generation"] * row["timing/generation"]
        assert sampled == pytest.approx(row[names.TOKENS_SAMPLED])
        assert row["dynamic_filtering_pass_rate"] == pytest.approx(100 * 12 / row[names.TOKENS_SAMPLED])


def test_a_step_is_trained_on_its_own_rows_with_the_coefficient_of_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adaptive coefficient that a skipped step's KL would make NaN stays as it was."""
    kls = [0.1, float("nan"), 0.1, 0.2]
    actors = Group(status=lambda number: {"kl": kls[number]})
    args = run_arguments(tmp_path, "--algo.kl.init_coef", "0.1", "--algo.kl.target", "6", "--algo.kl.horizon", "100")
    run = controller(monkeypatch, args, actors)
    run.fit()
    adaptive, expected = AdaptiveKLController(0.1, 6, 100), []
    for kl in kls:
        expected.append(adaptive.value)
        if kl == kl:
            adaptive.update(kl, args.rollout.batch_size * args.rollout.n_samples_per_prompt)
    assert actors.trained == expected and run.kl_control.value == adaptive.value
    assert [sum(len(each.sequences) for each in step) for step in actors.dealt] == [12, 12, 12, 12, 0]


def test_the_policy_waits_for_its_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = run_arguments(tmp_path, "--critic.freezing_steps", "1")
    run = controller(monkeypatch, args, actors := Group())
    run.fit()
    assert run.step == 4 and len(actors.trained) == 2, "of the steps after the second"


@pytest.mark.parametrize(
    ("saved", "evaluated", "made"), [(0, [], [0]), (4, [0], [4]), (4, [0, 4], []), (3, [0, 2], [])], ids=str
)
def test_an_evaluation_that_an_interruption_cut_off_is_made_when_the_run_goes_on(
    saved: int, evaluated: list[int], made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every second step is evaluated. By then the engines have the checkpoint's weights, which are sent once. A best
    checkpoint is kept, even if the interruption cut off only its saving."""
    argv = ("--eval.before_training", "--eval.dataset", "x", "--eval.steps", "2", "--ckpt.load_enable")
    argv += ("--algo.kl.init_coef", "0.5", "--algo.dynamic_filtering_enable")
    argv += ("--algo.dynamic_filtering_range", "0", "1", "--logger.tensorboard_dir", str(tmp_path / "board"))
    args = run_arguments(tmp_path, *argv)
    # The episode is over, so no step follows.
    states = {"global_step": saved, "episode": 1, "total_consumed_prompts": 64, "data_loader_state_dict": {}}
    states |= {"best_eval_metric_key": "eval_x_pass1", "best_eval_metric_value": 0.125}
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in evaluated:
        writer.write(names.KIND_EVAL, step, {"eval_x_pass1": 0.25})
    done: list[Any] = []
    evaluate = Sampler.evaluate

    def noted(self: Sampler, *given: Any) -> Any:
        done.append(saved)
        rows = evaluate(self, *given)
        for row in rows:
            row.reward = 0.25
        return rows

    monkeypatch.setattr(Sampler, "evaluate", noted)
    actors = Group(states)
    run = controller(monkeypatch, args, actors, held_out=2)
    if saved == 0:  # a run of no steps, of this start or an earlier one, has trained nothing
        with pytest.raises(
            TrainingStopped, match="No step was trained, .* no prompt's .* a mean score between 0 and 1 "
        ):
            run.fit()
    else:
        run.fit()
        said = capsys.readouterr().out
        warning = f"Warning: the checkpoint's step {saved} was the last with "
        assert f"{warning}--train.num_episodes 1;" in said
    assert done == made and [name for name, _ in actors.called].count("broadcast_to_vllm") == (saved > 0)
    assert list(actors.saved) == ["best_global_step4"] * (saved == 4)
    expected = states | {"best_eval_metric_value": 0.25}
    for best in actors.saved.values():
        assert expected.items() <= best["client_states"].items() and best["metric_value"] == 0.25
    assert [row["step"] for row in lines(tmp_path, names.KIND_EVAL)] == evaluated + made


def test_a_folder_without_a_whole_checkpoint_is_a_new_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = controller(monkeypatch, run_arguments(tmp_path, "--ckpt.load_enable"), Group({}))
    run.fit()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4]
