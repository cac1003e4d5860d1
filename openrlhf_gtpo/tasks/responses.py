"""What a reward function is given by OpenRLHF, taken apart. Knows no task."""

import re

SPECIAL_TOKEN = re.compile(r"<\|[^<>|]*\|>|</?s>|<pad>|<eos>")


def response_text(query: str, prompt: str) -> str:
    """What the model added to the prompt, without special tokens.

    A prompt that was cut to fit, or that does not decode to itself, is not the query's beginning; the response is then
    what follows the last turn's opening.
    """
    if query.startswith(prompt):
        response = query[len(prompt) :]
    else:
        response = query.rsplit("<|im_start|>assistant", 1)[-1]
    return SPECIAL_TOKEN.sub("", response).strip()
