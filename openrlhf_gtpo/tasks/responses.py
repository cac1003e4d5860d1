"""Takes apart what OpenRLHF hands to a reward function."""

import re
from collections.abc import Sequence

# Of ChatML, Llama 3, DeepSeek (whose bars are wide), Llama 2 and Gemma.
SPECIAL_TOKEN = re.compile(r"<[|｜][^<>|｜]*[|｜]>|</?s>|<(?:pad|bos|eos|start_of_turn|end_of_turn)>")
_ENDING = 20  # characters of a prompt's end by which it is found: about as long as the opening of a turn


def response_and_label(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> tuple[str, str]:
    """The response to the one prompt, without special tokens, and its label.

    A query does not begin with its prompt if the prompt was cut to fit, or does not decode to itself. The response is
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
