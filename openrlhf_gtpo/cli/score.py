"""`python3 -m openrlhf_gtpo.cli.score --model DIR --input FILE --output FILE`: entropies without training.

Writes the log-prob and the entropy (nats, over the whole vocabulary) of every token of given sequences, with either
backend at any layout. Starts its own processes, or uses the ones that torchrun has started. The input has a JSON
object on each line: {"tokens": [...]}, where all but the first are scored, or {"prompt": "...", "response": "..."},
where only the response is scored. An "id" is copied to the output. Text is tokenized as it is: the prompt's tokens,
then the response's, without special tokens or a chat template. A prompt that is a list of messages goes through the
template as in the model's training. The output has {"log_probs": [...], "entropies": [...]} in the same order. Flags
that only training reads (recompute, offload, optimizer, checkpoints) have no effect.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo import platform
from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.platform.files import check_output
from openrlhf_gtpo.platform.processes import launched_world_size
from openrlhf_gtpo.training.settings import megatron_flags

_DTYPES = ("bfloat16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Score a file. Return 0, 2 after one sentence on stderr for a user error, or 1 if a process failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    return exit_status("score", lambda: _score(args, given), OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.score", description=__doc__)
    add_input_flags(parser)
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="FILE", help="file for the scores; it appears once complete")
    add("--dtype", choices=_DTYPES, default=_DTYPES[0], help="dtype of the model")
    add(
        "--processes",
        type=int,
        metavar="N",
        help="total processes (GPUs); extra ones form replicas that share the rows (default: what one model needs, or "
        "torchrun's processes)",
    )
    add(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="run the Python code in the checkpoint (auto_map in its configuration files); without this flag such a "
        "checkpoint is refused",
    )
    megatron_flags.MEGATRON.add_to(parser)
    return parser


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that this command shares with ``benchmark fp8``."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder of a Hugging Face checkpoint")
    add("--input", required=True, type=Path, metavar="FILE", help="JSON lines with the sequences")
    add("--temperature", type=float, default=1.0, help="temperature of the policy")
    add("--max-tokens", "--max_tokens", type=int, default=8192, metavar="N", help="maximum tokens of a micro-batch")


def _score(args: argparse.Namespace, given: Sequence[str]) -> None:
    megatron_flags.refuse_stray(vars(args), given)
    platform.choose()

    from openrlhf_gtpo.scoring.inputs import ScoreModel, check
    from openrlhf_gtpo.scoring.score import score
    from openrlhf_gtpo.training.settings.guard import check_openrlhf

    check_openrlhf()
    from openrlhf.utils.config import hierarchize

    # Everything is checked before the processes start.
    check_output("--output", args.output, args.input, *Path(args.model).glob("*"))
    flags = hierarchize(args)
    layout = megatron_flags.layout_of(flags)
    processes = args.processes
    if processes is None:
        processes = launched_world_size() or layout.model_parallel_size
    model = ScoreModel(
        folder=args.model,
        backend=getattr(args, "actor.backend"),
        layout=layout,
        overrides=tuple(flags.megatron.override),
        fp8=megatron_flags.fp8_of(flags),
        dtype=args.dtype,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        trust_remote_code=args.trust_remote_code,
    )
    score(model, check(model, args.input, args.output, processes), args.output, processes)


if __name__ == "__main__":
    sys.exit(main())
