"""Log-probs and entropies of a response's tokens, from the engine's answers behind it.

An agent may call the engine any number of times and edit its answers. A token has values if the engine sampled it
after exactly the tokens that precede it in the response.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.rollout.answers import Answer, values_of

# Stored as a token's rank: (1 + version of the weights) times this, plus the 32 bits of the entropy. Ranks are
# smaller.
ENTROPY_TAG = 1 << 32

# Settings that change the sampling distribution, or the sampler's values.
_OF_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"),
    *("trace_decode_token_ids", "logprob_token_ids"),
)
_ROUNDING = 1e-3  # above ln V


def entropies(ranks: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the (n,) float32 entropies, in nats, that tokens carry as their ranks; NaN for a real rank."""
    tagged = np.asarray(ranks, dtype=np.int64)
    return np.where(tagged < ENTROPY_TAG, np.float32("nan"), tagged.astype(np.uint32).view(np.float32))


def versions(ranks: np.ndarray) -> np.ndarray:
    """Return the (n,) int32 versions of the tokens' weights from their int64 ranks; -1 for a real rank."""
    return (ranks // ENTROPY_TAG - 1).astype(np.int32)


def refuse_other_distributions(params: SamplingParams, temperature: float) -> None:
    """Raise TrainingStopped if ``params`` sample from anything but softmax(logits / ``temperature``)."""
    neutral = SamplingParams(temperature=temperature)
    allowed: dict[str, tuple[Any, ...]] = {name: (getattr(neutral, name), None) for name in _OF_DISTRIBUTION}
    for name, values in (allowed | {"top_k": (0, -1), "logprobs": (None, 0, 1)}).items():
        got = getattr(params, name)
        if got not in values:
            raise TrainingStopped(
                f"Expected {name} {values[0]!r} in a request's sampling parameters, got {got!r}: the sampler's "
                "entropies are for the policy's whole distribution. Let the agent keep that parameter, or give "
                "--rollout.entropy actor."
            )


def sampler_values(
    tokens: list[int], action_ranges: list[tuple[int, int]], answers: Sequence[Answer], vocab_size: int, row: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (2, n) float32 log-probs and entropies (nats) of a response's ``tokens`` (n,), prompt included; and (n,)
    int32 versions of the weights that sampled them.

    0 and -1 outside ``action_ranges``; NaN and -1 for an action that no answer has at its place, such as an agent's
    edit. ``row`` names the response in messages.

    Raises:
        TrainingStopped: an answer lacks entropies, or has one outside [0, ln ``vocab_size``].
    """
    values: np.ndarray = np.full((2, len(tokens)), np.nan, dtype=np.float32)
    drawn_by: np.ndarray = np.full(len(tokens), -1, dtype=np.int32)
    for prompt, output in answers:
        for answer in output.outputs:
            log_probs, entropy, ranks = _said(answer, vocab_size, row)
            start = len(prompt)
            if tokens[:start] == prompt:
                sampled = answer.token_ids[: len(tokens) - start]
                same = np.array(sampled) == tokens[start : start + len(sampled)]
                count = int(np.argmin(np.append(same, False)))
                place = slice(start, start + count)
                values[:, place], drawn_by[place] = (log_probs[:count], entropy[:count]), versions(ranks[:count])
    is_action: np.ndarray = np.zeros(len(tokens), dtype=bool)
    for start, end in action_ranges:
        is_action[start:end] = True
    return np.where(is_action, values, np.float32(0)), np.where(is_action, drawn_by, np.int32(-1))


def _said(answer: Any, vocab_size: int, row: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (n,) log-probs, entropies and ranks of an answer's tokens."""
    count, most = len(answer.token_ids), math.log(vocab_size)
    said = values_of(answer)[:count]
    log_probs, ranks, entropy = said["log_prob"], said["rank"], entropies(said["rank"])
    good = np.isfinite(log_probs) & (entropy >= 0) & (entropy <= most + _ROUNDING)
    if len(good) == count and good.all():
        return log_probs, entropy, ranks
    at = int(np.argmin(np.append(good, False)))
    got = f"log-prob {log_probs[at]:g}, entropy {entropy[at]:g}" if at < len(good) else "neither"
    raise TrainingStopped(
        f"Expected a finite log-prob and an entropy in [0, {most:.3f}] for every token that vLLM samples, got {got} "
        f"for token {at} of {count} (id {answer.token_ids[at]}) in an answer for {row}. "
        "To train without them, give --rollout.entropy actor."
    )
