"""Runs as one self-contained HTML page: the paper's figures, comparisons with the baseline, means and settings."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform.files import replace_text
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.curves import plot_figures
from openrlhf_gtpo.report.metrics import (
    Rows,
    datasource_of,
    decimals,
    held_out_names,
    idle_sentence,
    late_training_reward,
    read_runs,
    series,
)
from openrlhf_gtpo.tools.experiment.comparison import Difference, p_among_all, paired_difference
from openrlhf_gtpo.tools.experiment.grid import OURS

_HELD_OUT = "held-out reward"  # a training metric; "at step N" makes it a measure
_TRAINING = ("training", "reward of the last tenth of the steps")  # replaces a missing score
_OF_A_START = (*OURS, "kind", "step", "time", "run", "seed", "ended")  # these may differ between a label's runs
_OF_A_MODEL = ("model", "weights")  # these differ between evaluations


@dataclass(frozen=True)
class FoundRun:
    """A run on disk.

    Fields:
        seed: None if unknown.
        rows: its metrics.
        settings: its flags, recorded by an experiment, or else the settings in its metrics; plus the flags of its
            evaluation.
        scores: by data set and measure, a number for each question, or a single one if only the mean is known.
        questions: by data set, a digest of the questions that an evaluation has answered.
    """

    path: Path
    seed: int | None
    rows: Rows
    settings: Mapping[str, Any]
    scores: Mapping[tuple[str, str], np.ndarray]
    questions: Mapping[str, str]

    @property
    def under_way(self) -> bool:
        """True if its metrics do not show that it has ended."""
        return self.rows[0]["kind"] == names.KIND_RUN and not any(row.get("ended") for row in self.rows)


Runs = dict[str, list[FoundRun]]


def find_runs(arguments: Sequence[str], wanted: Container[Path] | None = None) -> tuple[Runs, list[Path]]:
    """Find the runs named on a command line, by label. Also return the runs of experiments that are left out, because
    they are unfinished, or not evaluated while others are.

    Args:
        arguments: ``LABEL=PATH`` of a metrics file or of a folder with one or with TensorBoard's files; or an
            experiment's folder, which gives labels of methods with their settings.
        wanted: folders of the runs to use from an experiment; None for all.

    Raises:
        UsageError: a folder has no runs, none is finished, a label has a seed twice or begins with _, or a file is
            foreign or truncated.
        ValueError: a run has no metrics.
    """
    runs: Runs = {}
    unfinished: list[Path] = []
    for text in arguments:
        # LABEL=PATH: the last run of one metrics file.
        label, separator, path = text.partition("=")
        if separator and label and path and not Path(text).exists():
            if label.startswith("_"):
                raise UsageError(f"Legends leave out labels that begin with _, such as {label!r}; rename it.")
            *earlier, rows = read_runs(path)
            runs.setdefault(label, []).append(run := _read(Path(path), rows))
            if earlier:
                left_out = f"{len(earlier)} of {len(earlier) + 1} runs, those before the last"
                print(f"{path}: left out {left_out}.", file=sys.stderr)
            if run.under_way:
                print(f"{path}: has not ended; its figures are from its last step.", file=sys.stderr)
            continue
        # An experiment's folder: its runs that have ended or, if some are evaluated, only those.
        folders = sorted(file.parent for file in Path(text).rglob("seed-*/flags.json"))
        # Skip copies, such as seed-1-old.
        folders = [folder for folder in folders if folder.name.removeprefix("seed-").isdigit()]
        folders = [folder for folder in folders if wanted is None or folder in wanted]
        if not folders:
            raise UsageError(f"{text} is not an experiment's folder; name a run as LABEL={text}.")
        ended = {}
        for folder in folders:
            rows = []
            with suppress(ValueError):  # the run has no metrics yet
                rows = read_runs(folder)[-1]
            if any(row.get("ended") for row in rows):
                ended[folder] = _read(folder, rows)
        evaluated = {folder: run for folder, run in ended.items() if run.questions}
        for folder, run in (evaluated or ended).items():
            method = folder.parent.relative_to(text).as_posix()
            runs.setdefault(Path(text).resolve().name if method == "." else method, []).append(run)
        unfinished += [folder for folder in folders if folder not in (evaluated or ended)]
    for label, group in runs.items():
        for first, second in combinations(group, 2):
            if first.seed is not None and first.seed == second.seed:
                raise UsageError(f"{label} has seed {first.seed} twice, in {first.path} and {second.path}; name one.")
    if not runs:
        raise UsageError(f"None of the {len(unfinished)} runs in {', '.join(arguments)} has finished; wait for one.")
    return runs, unfinished


def write_page(
    runs: Runs, folder: Path, title: str, baseline: str | None = None, unfinished: Sequence[Path] = ()
) -> tuple[Path, list[str]]:
    """Write ``index.html`` and each of its figures as PNG and SVG into ``folder``. Returns the page, and its sentences
    on the comparison with the baseline.

    Args:
        baseline: a label, or the method of labels METHOD/SETTING..., which are compared at equal settings.

    Raises:
        UsageError: the baseline is not among the runs, or it answered other questions.
    """
    # Each label against the baseline, by data set and measure.
    bases = _bases(runs, baseline) if baseline is not None else {}
    runs = dict(sorted(runs.items(), key=lambda item: item[0] not in bases.values()))
    differences: list[tuple[str, str, str, str, Difference]] = []
    not_compared = []
    for label, base in bases.items():
        for (data, measure), difference in _differences(label, runs[label], base, runs.get(base, [])).items():
            if difference is None:
                why = "their runs with the same seeds were never all evaluated at the same step"
                not_compared.append((label, f"{data}, {measure}: {label} is not compared with {base}, as {why}."))
            else:
                differences.append((label, base, data, measure, difference))
    compared = {row[0] for row in (*differences, *not_compared)}
    among = _among_all([row[:4] for row in differences], runs)
    # Draw the figures, and collect the columns of the table of means.
    figures = plot_figures({label: [run.rows for run in group] for label, group in runs.items()}, folder)
    shown = {row[2:4] for row in differences}
    for run in (run for group in runs.values() for run in group):
        shown |= {keys[-1] for keys in _held_out(run).values()}
        shown |= {key for key in run.scores if not key[1].startswith(_HELD_OUT)}
    columns = sorted(shown, key=_by_measure)
    # The sentences about the baseline.
    verdict = [_joint_sentence(*key, p) for key, p in among.items() if not key[-1].startswith("pass@")]
    verdict += [
        f"{data}, {measure}: {difference.sentence(label, base)}"
        for label, base, data, measure, difference in differences
        if not measure.startswith("pass@")
    ]
    verdict += [sentence for _, sentence in not_compared]
    alone = {
        label: _why_alone(runs[label], runs.get(base, [])) for label, base in bases.items() if label not in compared
    }
    # Write the page.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("page.html").read_text("utf-8"))
    page = folder / "index.html"
    text = template.render(
        title=title,
        decimals=decimals,
        baseline=baseline,
        runs=runs,
        unfinished=unfinished,
        under_way=[run.path for group in runs.values() for run in group if run.under_way],
        alone=alone,
        sentences=verdict
        + [
            f"{label}, {run.path.name}: {clause}."
            for label, group in runs.items()
            for run in group
            if (clause := idle_sentence(run.rows))
        ],
        differences=differences,
        among=among,
        figures={name: Markup(_inline(svg.read_text("utf-8"), name)) for name, svg in figures.items()},
        columns=columns,
        means={label: [_mean(group, key) for key in columns] for label, group in runs.items()},
        settings=_settings(runs),
    )
    replace_text(page, text)
    return page, verdict + [f"{label} is not compared: {why}." for label, why in alone.items()]


def _read(path: Path, rows: Rows) -> FoundRun:
    start: dict[str, Any] = next((dict(row) for row in reversed(rows) if row["kind"] == names.KIND_RUN), {})
    folder = path if path.is_dir() else path.parent
    flags, evaluation = folder / "flags.json", folder / "evaluation" / "scores.json"
    # Settings: recorded by the experiment, else from the metrics.
    try:
        settings = dict(json.loads(flags.read_text("utf-8"))) if flags.exists() else start
    except (ValueError, TypeError) as error:
        raise UsageError(f"{flags} was not written by cli.experiment; restore or remove it.") from error
    # Scores of the evaluation after training, question by question.
    evaluated: dict[str, Any] = {"questions": {}, "scores": {}}
    try:
        if evaluation.exists():
            evaluated = json.loads(evaluation.read_text("utf-8"))
        settings |= {
            f"evaluation of {data}: {name}": value
            for data, flags_of_data in evaluated.get("settings", {}).items()
            for name, value in flags_of_data.items()
            if name not in _OF_A_MODEL
        }
        scores = {
            (data, measure): np.array(values, float)
            for data, by_measure in evaluated["scores"].items()
            for measure, values in by_measure.items()
        }
        questions = dict(evaluated["questions"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{evaluation} was not written by cli.evaluate; restore or remove it.") from error
    # Held-out rewards in training; without any scores, the training reward.
    for name in held_out_names(rows):
        for step, value in zip(*series(rows, names.KIND_EVAL, name)):
            if step > 0:
                scores[datasource_of(name), f"{_HELD_OUT} at step {step}"] = np.array([value])
    if not scores and (late := late_training_reward(rows)) is not None:
        scores[_TRAINING] = np.array([late])
    named = re.findall(r"seed[-_=]?(\d+)", str(path))  # OpenRLHF's folders record the seed only in their names
    seed = start.get("seed", int(named[-1]) if named else None)
    differing = {name: value for name, value in settings.items() if name not in _OF_A_START}
    return FoundRun(path, seed, rows, differing, scores, questions)


def _why_alone(group: Sequence[FoundRun], base_group: Sequence[FoundRun]) -> str:
    """Say why a label is not compared with its baseline, as a clause."""
    if all({*run.scores} <= {_TRAINING} for run in (*group, *base_group)):
        return "no run was evaluated, neither in training (--eval.dataset) nor after it (evaluate:)"
    return "it shares no seed and measure with the baseline"


def _bases(runs: Runs, baseline: str) -> dict[str, str]:
    """Map each label except the baseline's to the label to compare it with, which may have no run."""
    baselines = {label for label in runs if label == baseline or label.split("/")[0] == baseline}
    if not baselines:
        raise UsageError(f"The baseline {baseline!r} is not among the runs {', '.join(runs)}; name one of them.")
    return {
        label: baseline if baseline in baselines else "/".join([baseline, *label.split("/")[1:]])
        for label in sorted(runs.keys() - baselines)
    }


def _differences(
    label: str, group: Sequence[FoundRun], base: str, base_group: Sequence[FoundRun]
) -> dict[tuple[str, str], Difference | None]:
    """Differences by data set and measure, over the seeds for which both groups have the measure. Training's held-out
    reward is taken at the last step at which all of these runs were evaluated; None if there is none."""
    by_seed = {run.seed: run for run in base_group if run.seed is not None}
    pairs = [(run, by_seed[run.seed]) for run in group if run.seed in by_seed]
    steps = defaultdict(list)
    for rewards, base_rewards in ((_held_out(run), _held_out(base_run)) for run, base_run in pairs):
        for data in rewards.keys() & base_rewards.keys():
            steps[data].append({*rewards[data]} & {*base_rewards[data]})
    last = {
        data: max(set.intersection(*keys), key=_by_measure, default=(data, _HELD_OUT)) for data, keys in steps.items()
    }
    shared = {key for run, base_run in pairs for key in run.scores.keys() & base_run.scores.keys()}
    ordered = sorted(shared | {*last.values()}, key=_by_measure)
    largest = {data: measure for data, measure in ordered if measure.startswith("pass@")}
    by_measure = {}
    for data, measure in ordered:
        if not ((data, measure) == last.get(data) or measure.startswith("mean@") or measure == largest.get(data)):
            continue
        having = [pair for pair in pairs if all((data, measure) in run.scores for run in pair)]
        if not measure.startswith(_HELD_OUT) and len({run.questions.get(data) for pair in having for run in pair}) > 1:
            raise UsageError(f"{label} and {base} answered different questions of {data}; evaluate both on the same.")
        values = [run.scores[data, measure] - base_run.scores[data, measure] for run, base_run in having]
        by_measure[data, measure] = paired_difference(np.array(values)) if having else None
    return by_measure


def _held_out(run: FoundRun) -> dict[str, list[tuple[str, str]]]:
    """A run's held-out rewards in training, by data set and in order of step."""
    by_data = defaultdict(list)
    for key in sorted(run.scores, key=_by_measure):
        if key[1].startswith(_HELD_OUT):
            by_data[key[0]].append(key)
    return by_data


def _among_all(rows: Sequence[tuple[str, str, str, str]], runs: Runs) -> dict[tuple[str, str, str], dict[str, float]]:
    """Each label's p among all labels with the same baseline, by baseline, data set and measure. Only for two or more
    labels with several seeds."""
    among = {}
    for base, data, measure in sorted({row[1:] for row in rows}, key=lambda key: (key[0], _by_measure(key[1:]))):
        seeds = {
            label: np.array([run.scores[data, measure].mean() for run in runs[label] if (data, measure) in run.scores])
            for label in [base, *(row[0] for row in rows if row[1:] == (base, data, measure))]
        }
        baseline = seeds.pop(base)
        seeds = {label: means for label, means in seeds.items() if len(means) > 1}
        if len(baseline) > 1 and len(seeds) > 1 and any(np.ptp(means) > 0 for means in [baseline, *seeds.values()]):
            among[base, data, measure] = dict(zip(seeds, p_among_all(list(seeds.values()), baseline)))
    return among


def _joint_sentence(base: str, data: str, measure: str, p: Mapping[str, float]) -> str:
    """Write the finding about all methods together in one sentence."""
    differing = sorted((value, label) for label, value in p.items() if value < 0.05)
    shown = [f"{label} (p {f'{value:.3f}' if value >= 0.001 else '< 0.001'})" for value, label in differing]
    finding = f"these differ from {base}: {', '.join(shown)}" if shown else f"no difference from {base} is seen"
    return f"{data}, {measure}: among all {len(p)} methods together, {finding}."


def _by_measure(key: tuple[str, str]) -> tuple[str, bool, str, int]:
    """Sort key: by data set, then by measure, with numbers in order: pass@4 before pass@32, step 9 before 10."""
    data, measure = key
    name, _, k = measure.replace(" at step ", "@").partition("@")
    return data, name not in ("mean", "pass", "best", "majority"), name, int(k or 0)


def _mean(group: Sequence[FoundRun], key: tuple[str, str]) -> str:
    values = [float(run.scores[key].mean()) for run in group if key in run.scores]
    if not values:
        return ""
    return decimals(fmean(values)) + (f" ± {decimals(stdev(values))}" if len(values) > 1 else "")


def _settings(runs: Runs) -> dict[str, list[str]]:
    """The settings that differ between labels, each with its values by label."""
    everything = sorted({name for group in runs.values() for run in group for name in run.settings})
    rows = {
        name: [", ".join(sorted({str(run.settings.get(name, "default")) for run in group})) for group in runs.values()]
        for name in everything
    }
    return {name: values for name, values in rows.items() if len({*values}) > 1}


def _inline(svg: str, title: str) -> str:
    """An SVG file's element without the ids of its groups, which are unused and must be unique in a page."""
    element = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
    return element.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
