"""What OpenRLHF hands to a reward function, taken apart."""

import re
from collections.abc import Sequence

SPECIAL_TOKEN = re.compile(r"<\|[^<>|]*\|>|</?s>|<pad>|<eos>")


def response_and_label(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> tuple[str, str]:
    """What the model added to the one prompt, without special tokens, and the label.

    A prompt that was cut to fit, or that does not decode to itself, is not the query's beginning; the response is then
    what follows the last turn's opening.

    Raises:
        ValueError: not exactly one response.
    """
    if not len(queries) == len(prompts) == len(labels) == 1:
        raise ValueError(
            "Expected one response at a time, "
            f"got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels."
        )
    query, prompt = queries[0], prompts[0]
    if query.startswith(prompt):
        response = query[len(prompt) :]
    else:
        response = query.rsplit("<|im_start|>assistant", 1)[-1]
    return SPECIAL_TOKEN.sub("", response).strip(), labels[0]
