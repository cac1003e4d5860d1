"""Requests to an OpenAI-compatible endpoint that serves a guide (``--algo.guide.endpoint``), and checks of its
answers: responses as token ids, each with its log-prob in the sampling distribution. Must import neither Ray nor vLLM,
because the endpoint is checked before a run starts.
"""

import os
from collections.abc import Mapping
from typing import Any

import httpx2  # openai depends on it
import openai  # vLLM depends on it

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.arguments import Arguments

_LOOK_LIMIT = 30.0  # seconds for each request before a run starts
_PROBES = (1, 10, 100)  # token ids for prompts; after at least one of them the next token is uncertain
_NOISE = 0.01  # nats by which one server's answers to the same prompt may differ
# Without these settings in a request, a server takes them from the model's generation_config.json.
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def api_key() -> str:
    """Return ``OPENAI_API_KEY``; a server that requires no key accepts any."""
    return os.environ.get("OPENAI_API_KEY") or "none"


def request(model: str, tokens: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``completions.create`` for one response to ``tokens``.

    Args:
        sampling: parameters under vLLM's names, which its server accepts as extra fields.
    """
    extra = {**_NEUTRAL, **sampling, "return_token_ids": True}
    return {"model": model, "prompt": tokens, "logprobs": 1, "extra_body": extra}


def ids_and_log_probs(choice: Any) -> tuple[list[int], list[float]]:
    """Return a response's token ids, and the log-prob of each.

    Raises:
        ValueError: the response lacks them.
    """
    ids = getattr(choice, "token_ids", None)
    if not isinstance(ids, list):
        raise ValueError("its responses have no token_ids; use a server such as vLLM's, which returns them.")
    log_probs = choice.logprobs and choice.logprobs.token_logprobs
    if log_probs is None or len(log_probs) != len(ids) or None in log_probs:
        raise ValueError("its responses have no log-prob for every token.")
    return ids, log_probs


def check_endpoint(args: Arguments) -> None:
    """Refuse a server whose log-probs ignore the run's temperature and top-p. Ratios to the guide would silently be
    wrong.

    Raises:
        UsageError: its log-probs ignore them, or it does not answer like vLLM's server.
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
        raise UsageError(f"{said} does not answer like vLLM's http://HOST:PORT/v1: {one_line(error)}") from error
    if not moves:
        raise UsageError(
            f"{said} returns log-probs before temperature and top-p, which differ from its sampling distribution; "
            "start it with --logprobs-mode processed_logprobs."
        )


def _highest_log_prob(client: openai.OpenAI, model: str, token: int, temperature: float) -> float:
    """Return the log-prob of the likeliest token after a prompt of one token."""
    asked = request(model, [token], {"temperature": temperature, "max_tokens": 1})
    [choice] = client.completions.create(**asked).choices
    ids_and_log_probs(choice)
    return max(choice.logprobs.top_logprobs[0].values())
