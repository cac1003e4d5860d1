"""Parses the arguments of OpenRLHF's reward functions."""

import re
from collections.abc import Sequence

# Special tokens of ChatML, Llama 3, DeepSeek (with wide bars), Llama 2 and Gemma.
SPECIAL_TOKEN = re.compile(r"<[|｜][^<>|｜]*[|｜]>|</?s>|<(?:pad|bos|eos|start_of_turn|end_of_turn)>")
_ENDING = 20  # characters of a prompt's end to search for: about as long as a turn's opening


def response_and_label(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> tuple[str, str]:
    """Return the response to the one prompt, without special tokens, and its label.

    A query may not begin with its prompt, if the prompt was truncated or does not decode to itself. The response is
    then the text after the last occurrence of the prompt's end.

    Raises:
        ValueError: not exactly one response.
    """
    if not len(queries) == len(prompts) == len(labels) == 1:
        raise ValueError(
            "Expected one response at a time, "
            f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels."
        )
    query, prompt = queries[0], prompts[0]
    response = query[len(prompt) :] if query.startswith(prompt) else query.rsplit(prompt[-_ENDING:], 1)[-1]
    return SPECIAL_TOKEN.sub("", response).strip(), labels[0]
