"""The controller's log: numbers and warnings of steps, and numbers of evaluations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor

from openrlhf_gtpo.algorithms import success
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.answers import best_of
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.controller.engines import Engines
from openrlhf_gtpo.training.controller.heartbeat import Phases
from openrlhf_gtpo.training.controller.rollouts import Rollouts
from openrlhf_gtpo.training.controller.step_costs import StepCosts
from openrlhf_gtpo.training.controller.trackers import Trackers
from openrlhf_gtpo.training.credit.entropy_credit import COMPARE_WITHIN_GROUPS, EntropyCredit
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
from openrlhf_gtpo.training.rows import Rollout, Row, ages

_MOSTLY = 0.9  # of a step's responses


@dataclass
class Log:
    """The log of a run, which writes each step's numbers to the trackers; ``costs`` cover the current step."""

    args: Arguments
    tokenizer: Any
    trackers: Trackers
    phases: Phases
    costs: StepCosts
    maker: ExperienceMaker
    engines: Engines
    rollouts: Rollouts
    warnings: Mapping[str, str] = field(default_factory=dict)  # the last step's

    def begin_step(self) -> None:
        """Begin a step."""
        self.costs.begin()
        self.phases.show(names.GENERATION)

    def describe(
        self, step: int, rollout: Rollout, own: Sequence[Experience], metrics: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the step's metrics besides those of its phases."""
        self.costs.after_training()
        args = self.args
        more = describe_rollout(own, self.tokenizer) | self.maker.metrics
        more[names.TIMING_STEP_TOTAL] = sum(metrics[names.timing(phase)] for phase in names.PHASES)
        if args.rollout.is_sampled:
            more[names.TOKENS_SAMPLED] = float(rollout.tokens)
        if args.train.max_restarts:
            more[names.RESTARTS_ENGINES] = float(self.engines.restarts)
            more[names.DROPPED_PROMPTS] = float(rollout.dropped)
        if args.train.async_enable:
            more |= staleness(rollout, step)
            more[names.TIMING_ROLLOUT] = rollout.seconds
            more[names.IDLE_TRAINER] = metrics[names.timing(names.GENERATION)]
        if "ppo_clip_ratio" in metrics:
            more[names.CLIP_FRACTION] = metrics["ppo_clip_ratio"]
        if args.algo.dynamic_filtering_enable:
            more["dynamic_filtering_pass_rate"] = rollout.passed
        return more

    def step(self, step: int, metrics: dict[str, Any], failures: str, stays: bool) -> None:
        """Write a trained step's metrics, and warn if it leaves nothing to learn.

        Args:
            failures: why checkpoints were not saved.
            stays: as for ``Trackers.train``.
        """
        # Once: the range of rewards, and what shared prompts save.
        args, maker = self.args, self.maker
        outcomes = outcomes_line(maker.outcome, maker.credit) if step == 1 else None
        if outcomes:
            print(outcomes, flush=True)
        if step == 1 and args.train.shares_prompts and names.TOKENS_ROWS in metrics:
            computed, of_rows = metrics[names.TOKENS_COMPUTED], metrics[names.TOKENS_ROWS]
            print(f"Shared prompts: {computed:,.0f} tokens are computed for rows of {of_rows:,.0f}.", flush=True)
        # Warnings, each printed when it appears.
        before = self.warnings
        self.warnings = step_warnings(metrics, maker.outcome, args, maker.credit)
        for name in self.warnings.keys() - before.keys():
            print(f"Warning, from step {step} on: {self.warnings[name]}", flush=True)
        # Costs and speed.
        metrics |= self.costs.end() | maker.seconds
        seconds = {phase: metrics.get(names.timing(phase), 0.0) for phase in names.PHASES}
        if args.train.async_enable:
            metrics[names.IDLE_ENGINES] = max(0.0, metrics[names.TIMING_STEP_WALL] - self.rollouts.take_busy())
            seconds[names.GENERATION] = metrics[names.TIMING_ROLLOUT]
        for phase in names.PHASES:
            if seconds[phase]:
                # Engines also sampled the tokens of dropped groups.
                of_engines = phase == names.GENERATION and metrics.get(names.TOKENS_SAMPLED)
                tokens = of_engines or self.costs.response_tokens
                metrics[names.tokens_per_second(phase)] = tokens / seconds[phase]
        shown = {name: value for name, value in metrics.items() if name != "generated_samples"}
        print(f"Global step {step}: {shown}", flush=True)
        notes = self.warnings | ({names.WARNING_PREFIX + "checkpoint": failures} if failures else {})
        notes |= {names.OUTCOMES: outcomes} if outcomes else {}
        self.trackers.train(step, metrics, notes, stays)

    def evaluation(self, step: int, rows: Sequence[Row], held_out: Any) -> dict[str, float]:
        """Write the metrics of an evaluation; returns upstream's.

        Args:
            rows: of all prompts in the loader ``held_out``.
        """
        sources, samples = sources_of(held_out), self.args.eval.n_samples_per_prompt
        metrics = eval_metrics(rows, sources, samples)
        self.trackers.evaluation(step, metrics, held_out_statistics(rows, sources, samples))
        print(f"Evaluation of step {step}: {metrics}", flush=True)
        return metrics


def step_warnings(
    status: Mapping[str, Any], outcome: Tensor, args: Arguments, credit: EntropyCredit | None
) -> dict[str, str]:
    """Return warnings about steps that leave nothing to learn, by name; each sentence has the flag that helps.

    Args:
        status: a step's metrics.
        outcome: (B,) the step's rewards before any length penalty.
    """
    sentences = {"groups": _equal_groups(status, outcome, args, credit), "truncated": _cut_off(status, args)}
    return {names.WARNING_PREFIX + name: sentence for name, sentence in sentences.items() if sentence}


def outcomes_line(outcome: Tensor, credit: EntropyCredit | None) -> str | None:
    """Describe a rollout's rewards and how many count as successes; None if the estimator has no threshold.

    Args:
        outcome: (B,) rewards before any length penalty.
    """
    threshold = getattr(credit and credit.config, "success_threshold", None)
    if credit is None or threshold is None:
        return None
    low, high = outcome.float().aminmax()
    succeeded = success(outcome, threshold)
    line = (
        f"Rewards are {low.numpy()!s} to {high.numpy()!s}, {outcome.float().mean():.3f} on average; "
        f"{int(succeeded.sum())} of {len(outcome)} reach --algo.{credit.name}.success_threshold {threshold:g} and "
        "count as successes, the others as failures"
    )
    partial = ~succeeded & (outcome > outcome.min())
    return (
        f"{line}, including {int(partial.sum())} in between; lower the threshold if these are right."
        if partial.any()
        else (f"{line}.")
    )


def _equal_groups(
    status: Mapping[str, Any], outcome: Tensor, args: Arguments, credit: EntropyCredit | None
) -> str | None:
    """A warning if no group has what the estimator compares: for GTPO and GRPO-S successes and failures, for other
    estimators different rewards."""
    groups, samples = status[names.GROUPS_TOTAL], args.rollout.n_samples_per_prompt
    if credit is None or not hasattr(credit.config, "shape_uniform_groups"):
        compares = credit is not None or args.algo.advantage.estimator in COMPARE_WITHIN_GROUPS
        uniform = compares and status.get("group_reward_std") == 0
        what = "rewards are equal"
    else:
        uniform = credit.needs_both and status[names.GROUPS_UNIFORM] == groups
        flag, threshold = f"--algo.{credit.name}.success_threshold", credit.config.success_threshold
        what = f"responses all succeed or all fail ({flag} {threshold:g})"
        low, high = outcome.float().aminmax()
        if low < high and not success(outcome, threshold).any():
            return (
                f"0 of {len(outcome)} responses reach {threshold} (rewards {low.numpy()!s} to {high.numpy()!s}), so "
                f"none counts as a success; lower {flag}, or check the reward (docs/reward.md)."
            )
    if not uniform:
        return None
    return (
        f"in each of the {groups:.0f} groups the {samples} {what}, with a mean reward of "
        f"{status[names.REWARD_MEAN]:.3f}, so nothing is learned; check the reward (docs/reward.md), or give "
        f"a --rollout.n_samples_per_prompt above {samples}."
    )


def _cut_off(status: Mapping[str, Any], args: Arguments) -> str | None:
    """A warning if most responses were cut off."""
    cut, rows = status["rollout/truncated_rate"], status["rollout/num_samples"]
    if cut < _MOSTLY:
        return None
    longest, whole = args.rollout.max_new_tokens, f"--data.max_len {args.data.max_len}"
    limit = f"--rollout.max_new_tokens {longest}" if longest else whole
    if longest and args.train.agent_func_path:  # OpenRLHF's agents read only the second
        limit = f"{limit} in a turn, or {whole} in all,"
    return f"{cut * rows:.0f} of {rows:.0f} responses were cut off at {limit} before their end; raise it."


def staleness(rollout: Rollout, step: int) -> dict[str, float]:
    """Return metrics of age: steps between the policy that sampled an action and the policy that trains on it in
    ``step``, and between a group's oldest and newest token, on average."""
    groups: dict[int, list[np.ndarray]] = {}
    for row in rollout.rows:
        groups.setdefault(row.number, []).append(ages(row, rollout.version, step))
    found = [np.concatenate(each) for each in groups.values()]
    every = np.concatenate(found)
    return {
        names.STALENESS_MEAN: float(every.mean()),
        names.STALENESS_MAX: float(every.max()),
        names.STALENESS_SPREAD: float(np.mean([np.ptp(each) if len(each) else 0 for each in found])),
    }


def describe_rollout(experiences: Sequence[Experience], tokenizer: Any) -> dict[str, Any]:
    """Return upstream's statistics of a step's own rows (openrlhf 0.11.2, trainer/ppo_trainer.py,
    _compute_rollout_stats), and the first row's text, as rewards read it, with its reward."""
    rewards = torch.cat([experience.info["reward"] for experience in experiences]).float()
    lengths = torch.cat([experience.response_length for experience in experiences]).float()
    truncated = torch.cat([experience.truncated for experience in experiences]).float()
    tokens = experiences[0].sequences[0][experiences[0].attention_mask[0].bool()]
    [text] = tokenizer.batch_decode(tokens.unsqueeze(0), skip_special_tokens=False)
    return {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        "rollout/response_length_mean": lengths.mean().item(),
        names.RESPONSE_LENGTH_MAX: lengths.max().item(),
        "rollout/truncated_rate": truncated.mean().item(),
        "rollout/num_samples": float(len(rewards)),
        "generated_samples": [text, experiences[0].info["reward"][0].item()],
    }


def sources_of(eval_dataloader: Iterable[Any]) -> list[str]:
    """Return the data source of each prompt, by its number."""
    return [source for sources, *_ in eval_dataloader for source in sources]


def eval_metrics(rows: Sequence[Row], sources: Sequence[str], samples_per_prompt: int) -> dict[str, float]:
    """Return upstream's metrics of an evaluation (openrlhf 0.11.2, trainer/ppo_trainer.py, compute_eval_metrics), for
    each data source and for all. Upstream identifies a question by its text, so that a question in two data sets
    counts only for the last one; here its number identifies it.

    Args:
        rows: responses, those to one prompt next to each other.
        sources: data source by the prompt's number.
    """
    if not rows:
        return {}
    found: dict[str, float] = {}
    by_source: dict[str, list[Sequence[Row]]] = {}
    for responses in _groups(rows, samples_per_prompt):
        by_source.setdefault(sources[responses[0].number], []).append(responses)
    for source, questions in by_source.items():
        rewards = [torch.tensor([row.reward for row in responses]).float() for responses in questions]
        name = f"{names.EVAL_PREFIX}{source}"
        best = sum(each.max().item() for each in rewards) if samples_per_prompt > 1 else 0.0
        found[f"{name}_pass{samples_per_prompt}"] = best / len(questions)
        found[f"{name}{names.EVAL_PASS1_SUFFIX}"] = sum(each.mean().item() for each in rewards) / len(questions)
        found |= _lengths(f"{name}_", [row for responses in questions for row in responses])
    return found | _lengths(names.EVAL_PREFIX, rows) | {"eval_num_samples": float(len(rows))}


def _lengths(prefix: str, rows: Sequence[Row]) -> dict[str, float]:
    return {
        f"{prefix}response_length_mean": sum(row.num_actions for row in rows) / len(rows),
        f"{prefix}truncated_rate": sum(row.truncated for row in rows) / len(rows),
    }


def _groups(rows: Sequence[Row], samples_per_prompt: int) -> Iterator[Sequence[Row]]:
    return (rows[first : first + samples_per_prompt] for first in range(0, len(rows), samples_per_prompt))


def held_out_statistics(rows: Sequence[Row], sources: Sequence[str], samples_per_prompt: int) -> dict[str, float]:
    """Return statistics of the held-out reward that upstream lacks, by metric name: its standard error over questions,
    if a data source has several, and the mean best of k responses for each k in the paper, if there are more than k.
    Arguments as for :func:`eval_metrics`.
    """
    rewards: dict[str, list[list[float]]] = {}
    for responses in _groups(rows, samples_per_prompt):
        of_source = rewards.setdefault(sources[responses[0].number], [])
        of_source.append(torch.tensor([row.reward for row in responses]).float().tolist())
    found = {}
    for source, questions in rewards.items():
        if len(questions) > 1:
            error = torch.tensor(questions).mean(dim=1).std().item() / len(questions) ** 0.5
            found[f"{names.EVAL_PREFIX}{source}{names.EVAL_PASS1_SUFFIX}{names.EVAL_ERROR_SUFFIX}"] = error
        for k in names.BEST_OF:
            if k < samples_per_prompt:
                found[names.eval_best_of(source, k)] = sum(best_of(each, k) for each in questions) / len(questions)
    return found
