"""The engine's answers behind a response, and what its sampler said about the response's tokens.

An agent may ask the engine as often as it likes and do what it likes with the answers. A token has values if the
engine sampled it after exactly the tokens that precede it in the response.
"""

import math
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs

from openrlhf_gtpo.errors import TrainingStopped

ENTROPY_TAG = 1 << 32  # marks a rank as an entropy, whose 32 bits are added to it; no token's rank is as high

# Settings that change the distribution that a token is drawn from, or what the sampler says about it.
_OF_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget"),
    *("trace_decode_token_ids", "logprob_token_ids"),
)
_ROUNDING = 1e-3  # above ln V

Answer = tuple[list[int], Any]  # a prompt's tokens, and one of the ``outputs`` of vLLM's RequestOutput


def entropies(ranks: list[int]) -> np.ndarray:
    """(n,) float32 entropies in nats that tokens carry as their ranks; NaN for a real rank."""
    tagged = np.array(ranks, dtype=np.int64) - ENTROPY_TAG
    return np.where(tagged < 0, np.float32("nan"), tagged.astype(np.uint32).view(np.float32))


def refuse_other_distributions(params: SamplingParams, temperature: float) -> None:
    """Raise TrainingStopped if tokens would be drawn from anything but softmax(logits / ``temperature``)."""
    neutral = SamplingParams(temperature=temperature)
    allowed: dict[str, tuple[Any, ...]] = {name: (getattr(neutral, name), None) for name in _OF_DISTRIBUTION}
    for name, values in (allowed | {"top_k": (0, -1), "logprobs": (None, 0, 1)}).items():
        got = getattr(params, name)
        if got not in values:
            raise TrainingStopped(
                f"Expected {name} {values[0]!r} among a request's sampling parameters, got {got!r}: entropies from "
                "the sampler are of the policy's whole distribution. Let the agent leave it as it is, or give "
                "--rollout.entropy actor."
            )


def sampler_values(
    tokens: list[int], action_ranges: list[tuple[int, int]], answers: list[Answer], vocab_size: int, row: str
) -> np.ndarray:
    """(2, n) float32 log-probs and entropies (nats) of a response's ``tokens`` (n,), prompt included.

    0 outside ``action_ranges``; NaN for an action that no answer has in its place, such as one that an agent edited.
    ``row`` names the response in messages.

    Raises:
        TrainingStopped: an answer lacks entropies, or has one outside [0, ln ``vocab_size``].
    """
    values = np.full((2, len(tokens)), np.nan)
    for prompt, answer in answers:
        said = _said(answer, vocab_size, row)
        start = len(prompt)
        if tokens[:start] == prompt:
            sampled = answer.token_ids[: len(tokens) - start]
            same = np.array(sampled) == tokens[start : start + len(sampled)]
            count = int(np.argmin(np.append(same, False)))
            values[:, start : start + count] = said[:, :count]
    is_action: np.ndarray = np.zeros(len(tokens), dtype=bool)
    for start, end in action_ranges:
        is_action[start:end] = True
    return np.where(is_action, values, 0.0).astype(np.float32)


def _said(answer: Any, vocab_size: int, row: str) -> np.ndarray:
    """(2, n) log-probs and entropies of an answer's tokens."""
    flat, count = answer.logprobs or FlatLogprobs(), len(answer.token_ids)
    log_probs, entropy = np.array(flat.logprobs[:count]), entropies(flat.ranks[:count])
    most = math.log(vocab_size)
    good = np.isfinite(log_probs) & (entropy >= 0) & (entropy <= most + _ROUNDING)
    if len(good) == count and good.all():
        return np.stack([log_probs, entropy])
    at = int(np.argmin(np.append(good, False)))
    got = f"log-prob {log_probs[at]:g}, entropy {entropy[at]:g}" if at < len(good) else "neither"
    raise TrainingStopped(
        f"Expected a finite log-prob and an entropy in [0, {most:.3f}] for every token that vLLM samples, got {got} "
        f"for token {at} of {count} (id {answer.token_ids[at]}) in an answer for {row}. "
        "--rollout.entropy actor needs neither."
    )
