"""`python3 -m openrlhf_gtpo.cli.ask MODEL QUESTION`: asks a model, such as one that was just trained, a question.

The question goes through the model's chat template, if it has one. The answer takes the likeliest token at each step.
"""

import sys
from collections.abc import Sequence

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer. Return 0, or 2 after one sentence on stderr for a user error."""
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.ask", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face checkpoint: a folder, or a name on the hub")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="maximum tokens of the answer")
    args = parser.parse_args(argv)
    return exit_status("ask", lambda: print(answer(args.model, args.question, args.max_tokens)))


def answer(model: str, question: str, max_tokens: int) -> str:
    """The answer of the checkpoint ``model`` to ``question``, by greedy decoding.

    Raises:
        UsageError: the checkpoint cannot be read, the question is empty, or there is no room for an answer.
    """
    from transformers import AutoModelForCausalLM, pipeline
    from transformers.utils import logging

    from openrlhf_gtpo.integration.checks.models import check_model, check_weights_fit, load_tokenizer

    if max_tokens < 1:
        raise UsageError(f"Expected --max-tokens >= 1, got {max_tokens}.")
    if not question.strip():
        raise UsageError("The question is empty.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_model(model, "MODEL")
    check_weights_fit(model, "MODEL")
    tokenizer = load_tokenizer(model, "MODEL")
    generate = pipeline("text-generation", AutoModelForCausalLM.from_pretrained(model), tokenizer=tokenizer)
    asked = [{"role": "user", "content": question}] if tokenizer.chat_template else question
    # A penalty in the checkpoint's generation_config.json is not part of the policy: training does not read it either.
    likeliest = {"do_sample": False, "repetition_penalty": 1.0}
    [made] = generate(asked, max_new_tokens=max_tokens, return_full_text=False, **likeliest)
    return made["generated_text"].strip()


if __name__ == "__main__":
    sys.exit(main())
