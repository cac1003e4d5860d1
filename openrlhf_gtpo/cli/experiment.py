"""`python3 -m openrlhf_gtpo.cli.experiment FILE.yaml`: methods × settings × seeds, trained one after another.

Everything is checked before the first run. Each run has a folder, OUTPUT/METHOD/SETTING.../seed-N, with its metrics,
log, model, checkpoints and, if the file asks for it, evaluation. After an interruption, the same command resumes:
finished runs are kept, and an unfinished one resumes from its last checkpoint (flag ckpt.save_steps) or restarts. On
several hosts that share OUTPUT, the same command divides the runs among them. At the end, OUTPUT has table.md,
curves.png and report/index.html with the finished runs.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from openrlhf_gtpo.cli import Parser, evaluate, exit_status
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.report.metrics import Rows, read_runs
from openrlhf_gtpo.tools.experiment.grid import Grid, places, read_grid, words
from openrlhf_gtpo.tools.experiment.runner import check_folders, has_checkpoint, is_finished, is_trained, run_all
from openrlhf_gtpo.training.settings.prompts import AGENT, filled


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment. Return 0, 2 after a sentence on stderr for a user error, 1 if a run failed, or 130 if a
    signal or a request to stop ended it."""
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.experiment", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file with the experiment (docs/experiments.md)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and list the runs")
    args = parser.parse_args(argv)
    interrupted = "interrupted; the same command resumes it."
    return exit_status("experiment", lambda: _experiment(args), OSError, interrupted=interrupted)


def _experiment(args: argparse.Namespace) -> None:
    grid = read_grid(args.file)
    check_folders(grid)
    _check(grid)
    if args.dry_run:
        for run in grid.runs:
            print(f"{run}: {run.folder}{' (finished)' if is_finished(run, grid) else ''}")
        return
    try:
        if failures := run_all(grid):
            raise TrainingStopped(" ".join(failures))
    except BaseException:
        try:
            _write_results(grid)
        except (ValueError, OSError) as error:  # a failing report must not hide how the runs ended
            print(f"experiment: {error}", file=sys.stderr)
        raise
    _write_results(grid)


def _check(grid: Grid) -> None:
    """Reject combinations that cannot work. Seeds do not matter, so the first untrained run of each is checked."""
    from openrlhf_gtpo.training.run import check, parse

    # Parse each combination's command line, and find switches that `false` does not turn off.
    untrained = {run.label: run for run in reversed(grid.runs) if not is_trained(run)}
    parsed = {}
    for label, run in reversed(untrained.items()):
        # A run without a checkpoint restarts, which removes its old files.
        resume = {"ckpt.load_enable": True} if has_checkpoint(run) else places(run.folder / "new")
        with _named(label):
            parsed[label] = parse(words(run.flags | resume))
            for flag in (name for name, value in run.flags.items() if value is False):
                value: Any = parsed[label]
                for part in flag.split("."):
                    value = getattr(value, part, None)
                if value:
                    raise UsageError(
                        f"{flag}: false only leaves the flag out, and {flag} is on by default; write no-{flag}: "
                        "true, if the flag has that form."
                    )
    # The trainer's own checks.
    for label, args in parsed.items():
        with _named(label):
            check(args)
    # The evaluation's flags.
    if grid.evaluate is not None:
        parser = evaluate.build_parser()
        parser.error = _refuse  # type: ignore[method-assign]  # argparse's would print the usage of another command
        with _named("evaluate"):
            known = [flag.removeprefix("--") for flag in parser._option_string_actions]
            for name in grid.evaluate:
                if name not in known:
                    near = difflib.get_close_matches(name, known, 1)
                    hint = f"did you mean {near[0]}?" if near else "cli.evaluate --help lists the known ones."
                    raise UsageError(f"unknown flag {name}; {hint}")
            if "data.label_key" not in grid.evaluate and any(args.data.label_key for args in parsed.values()):
                raise UsageError(
                    "data.label_key is missing; without it the reward gets no answers. Copy it from training's flags."
                )
            evaluation = parser.parse_args([*words(grid.evaluate), "--model", "MODEL", "--output", "OUTPUT"])
            flags = evaluate.checked_flags(evaluation)
            # The evaluation's inputs, once for each model and agent that it will see.
            trained = (run.folder / "model" for run in grid.runs if is_trained(run) and not is_finished(run, grid))
            asked = [(str(folder), None, flags) for folder in trained]
            for at, args in parsed.items():  # as the evaluation will ask the models
                of_training = untrained[at].flags
                asked.append((args.actor.model_name_or_path, of_training.get(AGENT), filled(flags, of_training)))
            for model, agent, flags in {repr(each): each for each in asked}.values():
                own, rewarded = agent and AGENT not in grid.evaluate, "reward.remote_url" in grid.evaluate
                if own and rewarded:
                    print(
                        f"Models are trained with the agent {agent} and evaluated once, without it.", file=sys.stderr
                    )
                evaluate.checked_inputs(flags | {AGENT: agent} if own and not rewarded else flags, model)


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


@contextmanager
def _named(label: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from error


def _write_results(grid: Grid) -> None:
    from openrlhf_gtpo.report.curves import plot_comparison
    from openrlhf_gtpo.report.summary import comparison_markdown
    from openrlhf_gtpo.tools.experiment.page import find_runs, write_page

    runs: dict[str, list[Rows]] = {}
    for run in sorted(grid.runs, key=lambda run: run.label.split("/")[0] != grid.baseline):
        if is_finished(run, grid):
            runs.setdefault(run.label, []).append(read_runs(run.folder)[-1])
    if runs:
        table = comparison_markdown(runs)
        (grid.output / "table.md").write_text(table, encoding="utf-8")
        plot_comparison(runs, grid.output / "curves.png", str(grid.output))
        print(table, end="")
        labeled, unfinished = find_runs([str(grid.output)], {run.folder for run in grid.runs})
        baseline = grid.baseline if any(label.split("/")[0] == grid.baseline for label in labeled) else None
        page, verdict = write_page(labeled, grid.output / "report", str(grid.output), baseline, unfinished)
        told = "".join(f"\n{sentence}\n" for sentence in verdict)
        (grid.output / "table.md").write_text(table + told, encoding="utf-8")
        print(told, page, sep="\n")
    finished = sum(map(len, runs.values()))
    if finished < len(grid.runs):
        print(f"{finished} of {len(grid.runs)} runs are finished.")


if __name__ == "__main__":
    sys.exit(main())
