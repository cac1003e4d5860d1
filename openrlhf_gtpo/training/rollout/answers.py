"""The values of an answer's tokens, such as log-probs: one array with named columns per answer.

An engine with this package's scheduler (``vllm_scheduler.py``) holds a request's tokens and values until its end, and
sends the values as this array, (n, bytes of a token). If it also returns the experts of tokens, these come before the
values, and the array begins with rows for the prompt's tokens, without values. Any other engine sends values token by
token, and the array is made here.
"""

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

_HOLD = "hold_until_end"  # among a request's ``extra_args``

Answer = tuple[list[int], RequestOutput]  # a prompt's tokens, and vLLM's output for it


def columns(top: int = 0) -> np.dtype:
    """Return the columns of a token: rank, log-prob, and log-probs and ids of the ``top`` most likely tokens there.

    vLLM does not use the rank, so a sampler can store 64 bits of its own in it. Further values of a token are further
    columns, of any shape.
    """
    likely = [("top_log_probs", "<f4", (top,)), ("top_tokens", "<i4", (top,))] if top else []
    return np.dtype([("rank", "<i8"), ("log_prob", "<f4"), *likely])


def hold(params: SamplingParams) -> bool:
    """Ask for a request's tokens and values at its end; False, without a change, if they are needed earlier: vLLM's
    client looks for stop strings, and a prompt's log-probs come with the first token."""
    likely = params.logprob_token_ids is None and (params.logprobs or 0) >= 0  # -1: those of the whole vocabulary
    of_prompt = [getattr(params, name, None) for name in ("prompt_logprobs", "prompt_logprob_token_ids")]
    if params.stop or any(asked is not None for asked in of_prompt) or not likely:
        return False
    params.extra_args = {**(params.extra_args or {}), _HOLD: True}
    return True


def is_held(params: SamplingParams | None) -> bool:
    """True if :func:`hold` was asked for this request."""
    return params is not None and _HOLD in (params.extra_args or {})


def values_of(answer: CompletionOutput, top: int = 0) -> np.ndarray:
    """Return (n,) ``columns(top)`` of an answer's tokens; n is 0 if it came without values, or neither held nor as
    vLLM's ``FlatLogprobs``."""
    array, kind = answer.routed_experts, columns(top)  # vLLM's only array of an answer, bytes here if it was held
    if array is not None and array.ndim == 2:
        own = array[len(array) - len(answer.token_ids) :, -kind.itemsize :]
        return np.ascontiguousarray(own).view(kind)[:, 0]
    flat = answer.logprobs if isinstance(answer.logprobs, FlatLogprobs) and not top else FlatLogprobs()
    values = np.empty(len(flat), columns(top))
    values["rank"], values["log_prob"] = flat.ranks, flat.logprobs
    return values


def routes_of(answer: CompletionOutput, routers: int, k: int, dtype: type = np.uint8) -> np.ndarray:
    """Return (m, ``routers``, ``k``) experts of the first m tokens of prompt and answer: all but the last, which the
    engine has not computed. m is 0 if the engine was not asked to return them."""
    array, width = answer.routed_experts, routers * k * np.dtype(dtype).itemsize
    if array is not None and array.ndim == 2:
        array = np.ascontiguousarray(array[:-1, :width]).view(dtype)
    return np.empty((0, routers, k), dtype) if array is None else array.reshape(-1, routers, k)


def give_log_probs(answer: CompletionOutput, top: int) -> None:
    """Give an agent a held answer's values in vLLM's own form: as ``FlatLogprobs``, without tokens' text."""
    values, own = values_of(answer, top), np.array(answer.token_ids, np.int32)[:, None]
    count, width = len(values), 1 + top
    tokens, log_probs, ranks = own, values["log_prob"][:, None], values["rank"][:, None]
    if top:
        tokens = np.hstack([tokens, values["top_tokens"]])
        log_probs = np.hstack([log_probs, values["top_log_probs"]])
        ranks = np.hstack([ranks, np.tile(np.arange(1, width), (count, 1))])
    flat: list[Any] = [each.ravel().tolist() for each in (tokens, log_probs, ranks)]
    starts = range(0, count * width, width)
    answer.logprobs = FlatLogprobs(list(starts), [at + width for at in starts], *flat, [None] * (count * width))
    answer.cumulative_logprob = sum(values["log_prob"].tolist())
