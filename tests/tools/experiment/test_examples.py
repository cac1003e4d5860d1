"""The shipped experiments, parsed as training parses them, and what they hold equal."""

from pathlib import Path

import pytest

from openrlhf_gtpo.cli import evaluate
from openrlhf_gtpo.tasks.math_data import BENCHMARKS
from openrlhf_gtpo.tools.experiment.grid import read_grid, words
from openrlhf_gtpo.training.run import parse

EXPERIMENTS = Path(__file__).parents[3] / "examples" / "experiments"
FILES = sorted(EXPERIMENTS.glob("paper_*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_what_training_and_evaluation_take(file: Path) -> None:
    grid = read_grid(file)
    runs = {run.label: parse(words(run.flags)) for run in grid.runs if run.seed == 1}
    assert list(runs) == ["dapo", "grpo", "forking_tokens", "gtpo", "grpo_s"] and grid.baseline == "dapo"
    assert (runs["gtpo"].algo.gtpo.alpha1, runs["gtpo"].algo.gtpo.alpha2) == (1.0, 0.1)
    assert (runs["grpo_s"].algo.grpo_s.beta1, runs["grpo_s"].algo.grpo_s.beta2) == (1.0, 0.1)
    recipes = {
        label: (
            list(args.actor.eps_clip_low_high),
            args.algo.dynamic_filtering_enable,
            args.algo.dynamic_filtering_range,
            args.algo.kl.init_coef,
            args.reward.overlong_penalty_factor,
            round(args.reward.overlong_buffer_len),
        )
        for label, args in runs.items()
        if label != "grpo"
    }
    assert len({str(recipe) for recipe in recipes.values()}) == 1, recipes  # DAPO's, except for the credit
    assert grid.evaluate is not None
    flags = evaluate.build_parser().parse_args([*words(grid.evaluate), "--model", "MODEL", "--output", "OUTPUT"])
    assert [Path(name).stem for name in getattr(flags, "eval.dataset").split(",")] == list(BENCHMARKS)
    assert getattr(flags, "eval.n_samples_per_prompt") == runs["gtpo"].eval.n_samples_per_prompt == 32
    assert getattr(flags, "data.max_len") >= getattr(flags, "rollout.max_new_tokens") + 1024


def test_the_study_has_every_credit_and_surrogate_that_was_published() -> None:
    """It trains each with two optimizer steps per rollout, and evaluates it with the rollout's limits."""
    grid = read_grid(EXPERIMENTS / "study.yaml")
    runs = [parse(words(run.flags)) for run in grid.runs if run.seed == 1]
    credits = {"gtpo", "grpo_s", "forking_tokens", "entropy_bonus"}
    assert credits <= {args.algo.advantage.estimator for args in runs}
    surrogates = {"gspo_token", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "stare", "hapo", "htpo"}
    assert surrogates | {"ppo", "gspo"} == {args.actor.policy_loss_type for args in runs}
    readme = (EXPERIMENTS.parents[1] / "README.md").read_text()
    assert f"compares {len(runs)} methods in {len(grid.runs)} runs" in readme
    for args in runs:
        assert args.rollout.batch_size * args.rollout.n_samples_per_prompt == 2 * args.train.batch_size
        assert args.train.max_epochs == 1
    assert grid.evaluate is not None
    flags = evaluate.build_parser().parse_args([*words(grid.evaluate), "--model", "MODEL", "--output", "OUTPUT"])
    assert getattr(flags, "rollout.max_new_tokens") == runs[0].rollout.max_new_tokens
