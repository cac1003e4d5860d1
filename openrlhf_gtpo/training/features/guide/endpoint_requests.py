"""Requests to an OpenAI-compatible endpoint that serves a guide (``--algo.guide.endpoint``), and the answers it must
give: responses as token ids, each with its log-prob in the distribution that was sampled from. Must import neither Ray
nor vLLM, as the endpoint is checked before a run starts.
"""

import os
from collections.abc import Mapping
from typing import Any

import httpx2  # openai depends on it
import openai  # vLLM depends on it

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.arguments import Arguments

_LOOK_LIMIT = 30.0  # seconds for each request before a run starts
_PROBES = (1, 10, 100)  # token ids, at least one of which is a prompt without a certain next token
_NOISE = 0.01  # nats by which one server's answers to the same prompt may differ
# Settings that a server takes from the model's generation_config.json if a request does not give them.
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def api_key() -> str:
    """``OPENAI_API_KEY``; a server that requires no key accepts any."""
    return os.environ.get("OPENAI_API_KEY") or "none"


def request(model: str, tokens: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``completions.create`` for one response to ``tokens``.

    Args:
        sampling: parameters under vLLM's names, which its server takes as extra fields.
    """
    extra = {**_NEUTRAL, **sampling, "return_token_ids": True}
    return {"model": model, "prompt": tokens, "logprobs": 1, "extra_body": extra}


def sampled(choice: Any) -> tuple[list[int], list[float]]:
    """Token ids of a response, and the log-prob of each.

    Raises:
        ValueError: the response lacks them.
    """
    ids = getattr(choice, "token_ids", None)
    if not isinstance(ids, list):
        raise ValueError("its responses have no token_ids; those of vLLM's server have them.")
    log_probs = choice.logprobs and choice.logprobs.token_logprobs
    if log_probs is None or len(log_probs) != len(ids) or None in log_probs:
        raise ValueError("its responses have no log-prob for every token.")
    return ids, log_probs


def check_endpoint(args: Arguments) -> None:
    """Refuse a server that gives log-probs before temperature and top-p, where it does not sample by those: ratios to
    the guide would be wrong, and nothing would say so.

    Raises:
        UsageError: it does, or does not answer as it has to.
    """
    guide, rollout, moves = args.algo.guide, args.rollout, False
    if (rollout.temperature, rollout.top_p) == (1, 1):
        return
    said, model = f"--algo.guide.endpoint {guide.endpoint}", guide.model_name_or_path
    assert model is not None
    try:
        client = openai.OpenAI(base_url=guide.endpoint, api_key=api_key(), max_retries=0, timeout=_LOOK_LIMIT)
        for token in _PROBES:
            cold, warm = (_highest_log_prob(client, model, token, temperature) for temperature in (0.5, 1.0))
            moves |= abs(cold - warm) > _NOISE
    except (openai.APIError, httpx2.InvalidURL, ValueError, AttributeError, LookupError, TypeError) as error:
        raise UsageError(f"{said} does not answer as vLLM's http://HOST:PORT/v1 would: {one_line(error)}") from error
    if not moves:
        raise UsageError(
            f"{said} gives log-probs before temperature and top-p, which are not those that it samples by; start it "
            "with --logprobs-mode processed_logprobs."
        )


def _highest_log_prob(client: openai.OpenAI, model: str, token: int, temperature: float) -> float:
    """The log-prob of the likeliest token after a prompt of one token."""
    asked = request(model, [token], {"temperature": temperature, "max_tokens": 1})
    [choice] = client.completions.create(**asked).choices
    sampled(choice)
    return max(choice.logprobs.top_logprobs[0].values())
