"""The first prompt as the model will read it, shown before anything starts, with notes on pitfalls of its tokenizer
and chat template."""

from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import token_ids
from openrlhf_gtpo.training.settings.frozen import changed
from openrlhf_gtpo.training.settings.prompts import template_variables

_SHOWN = 8  # token ids from either end
_HEAD, _TAIL = 1200, 400  # characters of a long prompt

# Messages that try a second turn.
_ANSWER = {"role": "assistant", "content": "An answer."}
_QUESTION = {"role": "user", "content": "Another question."}


def show_prompt(row: Mapping[str, Any], args: Arguments, tokenizer: Any) -> str:
    """Format the prompt of ``row``: its text, its first and last token ids, and notes, one per line."""
    from openrlhf_gtpo.training.checks.prompts import prompt_and_label

    prompt, _ = prompt_and_label(row, args, tokenizer)
    ids, bos = token_ids(tokenizer, prompt), getattr(tokenizer, "bos_token_id", None)
    begins = f"{ids.count(bos)} BOS ({tokenizer.bos_token})" if bos is not None else "a tokenizer without BOS"
    ends = [", ".join(map(str, part)) for part in (ids[:_SHOWN], ids[_SHOWN:][-_SHOWN:])]
    shown = prompt if len(prompt) <= _HEAD + _TAIL else f"{prompt[:_HEAD]} […] {prompt[-_TAIL:]}"
    lines = [f"The first prompt has {len(ids)} tokens, {' … '.join(filter(None, ends))}; {begins}:", shown]
    return "\n".join([*lines, *(f"Note: {note}" for note in _notes(row, args, tokenizer, prompt, ids))])


def _notes(row: Mapping[str, Any], args: Arguments, tokenizer: Any, prompt: str, ids: list[int]) -> Iterator[str]:
    from openrlhf_gtpo.training.checks.prompts import prompt_and_label

    # BOS missing or doubled.
    bos, data = getattr(tokenizer, "bos_token_id", None), args.data
    if bos is not None and bos not in ids and tokenizer(text="a")["input_ids"][:1] == [bos]:
        yield (
            f"this tokenizer begins a text with BOS, but training adds none (nor does OpenRLHF). If the model was "
            f"trained with BOS, write it into the prompts (--data.input_template '{tokenizer.bos_token}{{}}')."
        )
    if bos is not None and ids[:2] == [bos, bos]:
        yield "the prompt begins with two BOS: one from the data and one from the chat template."
    if not data.apply_chat_template:
        return

    def made(more: list[dict[str, str]] | None = None, **variables: Any) -> str:
        given = row[data.input_key]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        kwargs = template_variables(data.chat_template_kwargs) | variables
        varied = changed(args, {"data.chat_template_kwargs": kwargs})
        return prompt_and_label({**row, data.input_key: messages + (more or [])}, varied, tokenizer)[0]

    # Today's date: a variable of this name replaces the function that Transformers gives templates.
    if made(strftime_now=lambda form: "another day") != prompt:
        yield (
            "the chat template prints the date, so a run that is resumed on another day gets other prompts. If the "
            "template has a variable for it (Llama 3's is date_string), set it with --data.chat_template_kwargs."
        )
    # Turns: an agent appends to the tokens of a turn, which a template may render otherwise later.
    if args.train.agent_func_path:
        try:
            stable = made([_ANSWER, _QUESTION]).startswith(prompt + _ANSWER["content"])
        except Exception:  # templates are programs: this one takes no second turn here
            stable = False
        if not stable:
            yield (
                "with a second turn the chat template prints the first turn differently; an agent must append to the "
                "first turn's tokens instead of rendering the conversation again."
            )
