"""Takes apart what OpenRLHF hands to a reward function."""

import re
from collections.abc import Sequence

SPECIAL_TOKEN = re.compile(r"<\|[^<>|]*\|>|</?s>|<pad>|<eos>")


def response_and_label(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> tuple[str, str]:
    """The response to the one prompt, without special tokens, and its label.

    A query does not begin with its prompt if that was cut to fit or does not decode to itself; the response is then
    what follows the opening of the last turn.

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
