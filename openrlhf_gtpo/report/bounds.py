"""Where a run's time went, what bounds each phase, and an upper bound on how much a flag would save.

Everything follows from the run's own numbers: a bound removes the time that a flag can remove, and keeps everything
else as measured. Only flags that the run's settings allow count. The trainer names them (``offer/*`` in the first line
of ``metrics.jsonl``).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows, median_of_steps, series

_WORTH = 1.02  # speedup from which a flag is worth naming


class Gain(NamedTuple):
    """An upper bound on how much faster a run would be.

    Fields:
        factor: upper bound on the speedup with ``flags``.
        flags: the flags to give.
        why: what they remove, as a clause.
    """

    factor: float
    flags: str
    why: str


def notes(rows: Rows) -> dict[str, str]:
    """Describe what bounds each phase, for the phases that the run has numbers for."""
    found = {}
    mean, most = median_of_steps(rows, names.RESPONSE_LENGTH_MEAN), median_of_steps(rows, names.RESPONSE_LENGTH_MAX)
    if mean and most:
        found[names.GENERATION] = f"longest {most:,.0f} tokens, mean {mean:,.0f}"
    forward = median_of_steps(rows, names.timing(names.OLD_LOG_PROBS))
    if forward:
        found[names.MAKE_EXPERIENCE] = f"forward passes {forward:.2g} s"
    computed, tokens = median_of_steps(rows, names.TOKENS_COMPUTED), median_of_steps(rows, names.TOKENS_ROWS)
    if computed and tokens and computed > tokens:
        found[names.PPO_TRAIN] = f"{1 - tokens / computed:.0%} of its tokens are padding"
    elif computed and tokens:
        found[names.PPO_TRAIN] = f"computes {computed / tokens:.0%} of its tokens"
    return found


def between_steps(rows: Rows) -> float:
    """Sum the seconds between steps, for evaluations and checkpoints, since each start's first step."""
    seconds, since = 0.0, None
    for row in sorted(rows, key=lambda row: row["time"]):
        if row["kind"] == names.KIND_RUN and not row.get("ended"):
            since = None
        elif row["kind"] == names.KIND_TRAIN and names.TIMING_STEP_WALL in row:
            if since is not None:
                seconds += max(0.0, row["time"] - since - row[names.TIMING_STEP_WALL])
            since = row["time"]
        elif since is not None:  # after the last step
            seconds, since = seconds + row["time"] - since, row["time"]
    return seconds


def gains(rows: Rows) -> list[Gain]:
    """List what would have shortened the run, largest gain first, without negligible gains."""
    offers: dict[str, str] = {}
    for row in rows:
        offers |= {name: text for name, text in row.items() if name.startswith(names.OFFER_PREFIX)}
    found = [
        Gain(before / after, offers[name], why)
        for name, before, after, why in _bounds(rows, offers)
        if name in offers and before > _WORTH * after > 0
    ]
    return sorted(found, reverse=True)


def _bounds(rows: Rows, offers: Mapping[str, str]) -> Iterator[tuple[str, float, float, str]]:
    """Each offer with the seconds of a step, or of the run, and a lower bound on the seconds with it."""
    # Median seconds of a step and its phases. Without them nothing can be said.
    step = median_of_steps(rows, names.TIMING_STEP_WALL)
    phases = [median_of_steps(rows, names.timing(phase)) for phase in (*names.PHASES, names.OLD_LOG_PROBS)]
    if step is None or None in phases[:4]:
        return
    sampling, _, training, _, forward = (seconds or 0.0 for seconds in phases)
    # A synchronous run could sample ahead. An asynchronous one could stop waiting for its longest responses.
    waits = median_of_steps(rows, names.IDLE_TRAINER)
    if waits is None:
        why = "engines on their own GPUs sample while the policy trains"
        also = forward if "--rollout.entropy" in offers.get(names.OFFER_ONE_STEP_OFF, "") else 0.0
        yield names.OFFER_ONE_STEP_OFF, step, max(sampling, step - sampling - also), why
    else:
        rollout, mean, most = (
            median_of_steps(rows, name) or 0.0
            for name in (names.TIMING_ROLLOUT, names.RESPONSE_LENGTH_MEAN, names.RESPONSE_LENGTH_MAX)
        )
        left = max(step - waits, rollout * mean / most if most else rollout)
        yield names.OFFER_IN_FLIGHT, step, left, "engines do not wait for the longest response"
    yield names.OFFER_SAMPLER_ENTROPY, step, step - forward, "the forward pass for entropies is left out"
    # Tokens computed with each prompt once, over the tokens computed now.
    prompts, responses, computed, tokens = (
        median_of_steps(rows, name)
        for name in (names.TOKENS_PROMPT, names.TOKENS_RESPONSE, names.TOKENS_COMPUTED, names.TOKENS_ROWS)
    )
    if samples := next((row[names.SAMPLES] for row in rows if names.SAMPLES in row), None):
        if prompts and responses and computed and tokens:
            once = (prompts / samples + responses) / (computed * (prompts + responses) / tokens)
            left = step - (training + forward) * (1 - min(1.0, once))
            why = "each prompt is computed once for all its responses (by tokens; time may fall further)"
            yield names.OFFER_SHARED_PROMPTS, step, left, why
    # Work between steps, over the whole run.
    steps, walls = series(rows, names.KIND_TRAIN, names.TIMING_STEP_WALL)
    every = [int(word) for word in offers.get(names.OFFER_RARER, "").split() if word.isdigit()]
    if max(every, default=0) <= steps[-1]:  # otherwise the run would have none at all
        outside = between_steps(rows)
        run = outside + sum(walls)
        yield names.OFFER_RARER, run, run - outside / 2, "half as many evaluations and checkpoints"
