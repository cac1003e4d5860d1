"""A run goes on from a checkpoint with the settings and the data that its rows and its place in the data are of; what
differs is named, and what cannot be is refused.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.checks.origin import ORIGIN
from tests.support import controllers
from tests.training import test_resume
from tests.training.controller import test_rollouts, test_stream

PROMPTS = [str(number) for number in range(16)]
IN_TURN = test_rollouts.Run
KINDS: dict[str, Callable[..., Any]] = {
    "in turn": IN_TURN,
    "one step off": lambda *given, **more: test_rollouts.Run(*given, *test_rollouts.AHEAD, **more),
    "in flight": test_stream.Run,
}


def with_samples(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    """Have later runs draw so many responses to a prompt, of which not all score the same."""

    def arguments(folder: Path, *argv: str, **unused: Any) -> Any:
        return controllers.run_arguments(folder, *argv, estimator="group_norm", samples=samples)

    for module in (test_rollouts, test_stream):
        monkeypatch.setattr(module, "run_arguments", arguments)
    monkeypatch.setattr(test_stream, "GROUP", samples)


def states_of(run: Any, step: int) -> dict[str, Any]:
    return copy.deepcopy(run.actors.saved[f"global_step{step}"]["client_states"])


@pytest.mark.parametrize("kind", ["one step off", "in flight"])
@pytest.mark.parametrize("earlier", [False, True], ids=["", "of an earlier version"])
def test_rows_of_another_group_size_are_not_trained_on(
    kind: str, earlier: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_samples(monkeypatch, 3)
    whole = KINDS[kind](monkeypatch, tmp_path / "whole", 16)
    whole.controller.fit()
    for samples in (6, 2, 5):
        states = states_of(whole, 2)
        if earlier:
            del states[ORIGIN]
        with_samples(monkeypatch, samples)
        again = KINDS[kind](monkeypatch, tmp_path / f"{samples}", 16, loaded=states)
        wrong = "another --rollout.n_samples_per_prompt"
        if not earlier:
            wrong = (
                rf"n_samples_per_prompt is now {samples}, was 3: .* holds \d+ prompts that were sampled ahead; give 3"
            )
        with pytest.raises(AssertionError if earlier else UsageError, match=wrong):
            again.controller.fit()
        assert not again.actors.trained, "a step was trained"
        if earlier:
            again.controller.engines.ask(lambda: None).result()  # the thread samples what no step trains on


@pytest.mark.parametrize(
    ("flag", "value", "ahead_refuses"),
    [
        ("--rollout.n_samples_per_prompt", "6", True),
        ("--rollout.temperature", "0.5", True),
        ("--data.max_len", "48", False),
        ("--reward.remote_url", "other.py", False),
        ("--actor.adam.lr", "3e-06", False),
        ("--algo.advantage.gamma", "0.5", False),
        ("--data.dataloader_num_workers", "1", None),
    ],
)
def test_what_differs_is_named_or_refused(
    flag: str,
    value: str,
    ahead_refuses: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only what rows that are kept follow from has to stay, and only while there are such rows."""
    for kind in ("in turn", "one step off"):
        whole = KINDS[kind](monkeypatch, tmp_path / kind, 8)
        whole.controller.fit()
        assert not any("wandb" in name for name in states_of(whole, 3)[ORIGIN]["settings"]), "its key is a secret"
        capsys.readouterr()
        for step in (3, 4):  # of 4, after which none is ahead
            make = lambda *given, **more: KINDS[kind](*given, flag, value, **more)  # noqa: B023, E731
            again = make(monkeypatch, tmp_path / f"{kind}{step}", 8, loaded=states_of(whole, step))
            if ahead_refuses is None or (ahead_refuses and kind == "one step off" and step == 3):
                with pytest.raises(UsageError, match=f"{flag} is now {value}, was "):
                    again.controller.fit()
            else:
                again.controller.fit()
                assert f"Resuming after step {step}: {flag} is now {value}, was " in capsys.readouterr().out


def prompts_of(run: Any) -> list[str]:
    """The prompts that a run is trained on, in their order; has it run."""
    prompts: list[str] = []
    make = run.controller.maker.make

    def made(rows: Any, own: bool = True) -> Any:
        prompts.extend(row.prompt for row in rows[::3])
        return make(rows, own)

    run.controller.maker.make = made
    run.controller.fit()
    return prompts


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_were_appended_are_drawn_from_the_next_episode_on(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pass that was begun is completed as it began: no row is drawn twice in it, and none never."""
    more = [*PROMPTS, *map(str, range(16, 22))]
    whole = KINDS[kind](monkeypatch, tmp_path / "whole", PROMPTS)
    before = prompts_of(whole)
    for step in (1, 3, 4, 6):
        states = states_of(whole, step)
        again = KINDS[kind](monkeypatch, tmp_path / f"{step}", more, loaded=states)
        capsys.readouterr()
        after = prompts_of(again)
        assert "--data.prompt_dataset now has 22 rows, had 16: appended rows" in capsys.readouterr().out
        trained = before[: 4 * step] + after
        assert sorted(trained[:16]) == sorted(PROMPTS)
        # Engines that are ahead may have begun the second pass, which is of the old rows then.
        second = [PROMPTS] * (step > 4 or kind != "in turn" and step > 1) + [more] * (step < 5)
        assert sorted(trained[16:]) in map(sorted, second)
        if kind != "in flight":  # where the order depends on time
            later = KINDS[kind](monkeypatch, tmp_path / f"{step} later", more, loaded=states_of(again, step + 1))
            assert prompts_of(later) == after[4:], "with the place in the old rows"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "other", [PROMPTS[:12], [*PROMPTS[1:], "0"], [*map(str, range(100, 120))]], ids=["shorter", "moved", "other"]
)
def test_a_pass_over_other_rows_is_not_completed(
    kind: str, other: Sequence[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = KINDS[kind](monkeypatch, tmp_path / "whole", PROMPTS)
    whole.controller.fit()
    again = KINDS[kind](monkeypatch, tmp_path / "again", other, loaded=states_of(whole, 1))
    wrong = rf"--data.prompt_dataset now has {len(other)} rows, had 16, .* \d+ of them were drawn in this episode"
    with pytest.raises(UsageError, match=wrong):
        again.controller.fit()
    assert not again.actors.trained


def test_a_new_pass_may_be_over_other_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rows of the one before were drawn, whether or not the run has noticed."""
    other = [*map(str, range(100, 112))]
    for name, prompts, per_pass in (("whole rollouts", 16, 4), ("a short last one", 18, 5)):
        whole = IN_TURN(monkeypatch, tmp_path / name, prompts)
        whole.controller.fit()
        again = IN_TURN(monkeypatch, tmp_path / f"{name} again", other, loaded=states_of(whole, per_pass))
        capsys.readouterr()
        assert sorted(prompts_of(again)) == sorted(other)
        assert f"--data.prompt_dataset now has 12 rows, had {prompts}, and they differ" in capsys.readouterr().out


def test_other_questions_have_no_best_checkpoint_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = test_resume.Run(monkeypatch, tmp_path / "whole", 16)
    whole.fit()
    states = copy.deepcopy(whole.saved["global_step6"]["client_states"])
    assert states["best_eval_metric_value"] == pytest.approx(max(test_resume.SCORES.values()))
    for name, digest in (("same", None), ("other", "0")):
        if digest:
            states[ORIGIN]["data"]["--eval.dataset"]["digest"] = digest
        again = test_resume.Run(monkeypatch, tmp_path / name, 16, loaded=copy.deepcopy(states))
        again.fit()
        assert ("best_global_step6" in again.saved) == (name == "other")
        assert ("held-out numbers, and the best, are for other questions now" in capsys.readouterr().out) == (
            name == "other"
        )
