"""`python3 -m openrlhf_gtpo.cli.ask MODEL QUESTION`: asks a question of a model, such as one just trained.

A model trained by this package gets the prompt format of its run. Another model gets its chat template, if it has one,
as with --data.apply_chat_template in training. Decoding is greedy.
"""

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.training.settings import prompts

if TYPE_CHECKING:
    from openrlhf_gtpo.training.checks.model import Model


def main(argv: Sequence[str] | None = None) -> int:
    """Print the model's answer. Return 0, or 2 after one sentence on stderr for a user error."""
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.ask", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint: a folder, or a name on the Hub")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="maximum tokens of the answer")
    for setting in prompts.PROMPTS.settings:
        if not setting.flag.endswith("_key"):  # a question has no columns
            setting.add_to(parser)
    args = parser.parse_args(argv)
    given = {flag: value for flag, value in vars(args).items() if flag in prompts.NONE}
    return exit_status("ask", lambda: print(answer(args.model, args.question, args.max_tokens, given)), ValueError)


def answer(model: str, question: str, max_tokens: int, given: Mapping[str, Any] = prompts.NONE) -> str:
    """Return the answer of the checkpoint ``model`` to ``question``, by greedy decoding.

    Args:
        given: prompt settings by flag.

    Raises:
        UsageError: the checkpoint cannot be read.
        ValueError: the question is empty, or leaves no room for an answer.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    from openrlhf_gtpo.training.checks.model import Model, token_ids

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checkpoint = Model(model, "MODEL")
    checkpoint.check_weights()
    tokenizer = checkpoint.tokenizer
    tokens = torch.tensor([token_ids(tokenizer, prompt_of(checkpoint, question, given))])
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)  # the engines' dtype
    # vLLM reads nothing else from the checkpoint's generation_config.json for a training request.
    ends = causal_lm.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    causal_lm.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None, min_new_tokens=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generated = causal_lm.to(device).generate(tokens.to(device), max_new_tokens=max_tokens)
    return tokenizer.decode(generated[0, tokens.shape[1] :], skip_special_tokens=True).strip()


def prompt_of(checkpoint: "Model", question: str, given: Mapping[str, Any]) -> str:
    """Return the text that the model reads; ``given`` as for :func:`answer`."""
    from openrlhf_gtpo.training.checks.prompts import name_unread, prompt_and_label

    kept = prompts.kept_prompts(checkpoint.folder)
    if agent := kept.get(prompts.AGENT):
        print(f"The model was trained with the agent {agent}, and is asked once, without it.", file=sys.stderr)
    flags = {**prompts.NONE, "data.apply_chat_template": None, "data.input_template": None, **given}
    if not kept:
        flags["data.apply_chat_template"] = checkpoint.tokenizer.chat_template is not None
    settings = {flag.removeprefix("data."): v for flag, v in prompts.filled(flags, kept).items()}
    data = SimpleNamespace(**{**settings, "input_key": "question", "label_key": None})
    args: Any = SimpleNamespace(data=data)
    if data.apply_chat_template:
        name_unread(prompts.template_variables(data.chat_template_kwargs), checkpoint.tokenizer)
    return prompt_and_label({"question": question}, args, checkpoint.tokenizer)[0]


if __name__ == "__main__":
    sys.exit(main())
