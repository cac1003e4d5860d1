"""What a run measured, in the planner's terms: its lengths and its seconds by phase."""

from statistics import mean

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows, median_of_steps

_PHASES = {
    "rollout": names.timing(names.GENERATION),
    "forward": names.timing(names.MAKE_EXPERIENCE),
    "train": names.timing(names.PPO_TRAIN),
    "sync": names.timing(names.BROADCAST),
    "step": names.TIMING_STEP_WALL,
}


def seconds(rows: Rows) -> dict[str, float]:
    """Return a run's median seconds of each of the plan's phases that it has, and of a whole step. A rollout that was
    sampled ahead counts with the engines' seconds, not with the time that the trainer waited for it."""
    found = {phase: median_of_steps(rows, name) for phase, name in _PHASES.items()}
    found["rollout"] = median_of_steps(rows, names.TIMING_ROLLOUT) or found["rollout"]
    return {phase: took for phase, took in found.items() if took is not None}


def workload(rows: Rows) -> tuple[int, float, float]:
    """Return a run's mean responses per step, tokens per prompt and tokens per response.

    Raises:
        ValueError: no step has these numbers.
    """
    wanted = names.TOKENS_PROMPT, names.TOKENS_RESPONSE, names.RESPONSE_LENGTH_MEAN
    steps = [[row[name] for name in wanted] for row in rows if all(row.get(name) for name in wanted)]
    if not steps:
        raise ValueError("no step has counted its tokens yet")
    prompt, response, length = map(mean, zip(*steps))
    responses = mean(tokens / length for _, tokens, length in steps)
    return round(responses), prompt / responses, response / responses
