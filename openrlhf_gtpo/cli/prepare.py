"""`python3 -m openrlhf_gtpo.cli.prepare {smollm2,tiny-model,task,math,benchmarks} --output DIR`: models and data.

A second call of the first three with the same settings returns at once. `math` and `benchmarks` overwrite nothing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.platform.files import check_output
from openrlhf_gtpo.tasks.math_data import BENCHMARKS, INSTRUCTION, load_table, write_benchmarks, write_math_files
from openrlhf_gtpo.tasks.reasoning_gym_data import PRESETS, write_task_files
from openrlhf_gtpo.tasks.smollm2 import convert_smollm2
from openrlhf_gtpo.tasks.tiny_model import make_tiny_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, or 2 after one sentence on stderr for a user error."""
    args = build_parser().parse_args(argv)
    return exit_status(f"prepare {args.command}", lambda: _prepare(args), ValueError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.prepare", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct as a Hugging Face checkpoint (20 s, 270 MB)")
    smollm2.set_defaults(run=lambda args: convert_smollm2(args.output))

    tiny = commands.add_parser("tiny-model", help="a 2-layer Llama for smoke tests, warm-started on `products` (20 s)")
    tiny.add_argument("--seed", type=int, default=1, help="seed of the weights and of the warm start")
    tiny.add_argument("--moe", action="store_true", help="a mixture of experts: a 4-layer Qwen3-MoE (40 s)")
    tiny.set_defaults(run=lambda args: make_tiny_model(args.output, args.seed, args.moe))

    task = commands.add_parser("task", help="train.jsonl and eval.jsonl of a reasoning-gym task")
    add = task.add_argument
    add(
        "--preset",
        choices=sorted(PRESETS),
        help="a set of settings that the flags below override: quickstart (products of two one-digit numbers, for "
        "SmolLM2) or smoke (for tiny-model)",
    )
    add("--task", help="a reasoning-gym data set, such as products, gcd, chain_sum (default: the preset's)")
    add("--train-size", type=int, default=75, help="training questions")
    add("--train-rows", type=int, help="repeat or cut the training questions to this many rows (default: each once)")
    add("--eval-size", type=int, default=24, help="held-out questions")
    add("--seed", type=int, default=1, help="seed of the questions")
    add(
        "--task-config",
        metavar="JSON",
        help="fields of the task's config, such as '{\"max_digits\": 2}' (default: small settings for products, gcd "
        "and chain_sum, otherwise reasoning-gym's own, as with '{}')",
    )
    add("--instruction", metavar="TEXT", help="appended to each question")
    add("--system", metavar="TEXT", help="system message (default: the chat template's own)")
    add(
        "--question-form",
        metavar="TEMPLATE",
        help="form of the question, with the task's {question} and metadata, such as '{expression} =' for products",
    )
    add(
        "--example",
        dest="examples",
        nargs=2,
        action="append",
        metavar=("QUESTION", "ANSWER"),
        help="worked example before the question; may be repeated",
    )
    add("--label", choices=["answer"], help=argparse.SUPPRESS)  # the source of labels in 0.1
    task.set_defaults(run=_task)

    math = commands.add_parser("math", help="data set of problems and answers, for math_verify_reward.py")
    add = math.add_argument
    add("--source", required=True, help=".jsonl, .json, .csv or .parquet file, or a name on the Hugging Face Hub")
    add("--config", help="configuration of a data set on the Hub, such as main")
    add("--split", default="train", help="split of a data set on the Hub")
    add(
        "--problem-key",
        default="problem",
        help="column with the problem, as text or chat messages (default: %(default)s); a.b means field b of column a",
    )
    add("--answer-key", default="answer", help="column with the answer")
    add("--answer-after", metavar="TEXT", help="take the answer from after the last TEXT, such as '####'")
    add("--instruction", default=INSTRUCTION, metavar="TEXT", help="appended to each problem that is text")
    add("--system", default="", metavar="TEXT", help="system message (default: the template's own)")
    add("--eval-size", type=int, default=0, help="problems to hold out as eval.jsonl")
    add("--seed", type=int, default=1, help="seed for choosing the held-out problems")
    math.set_defaults(run=_math)

    benchmarks = commands.add_parser("benchmarks", help="questions for comparing models, for cli.evaluate")
    add = benchmarks.add_argument
    add("--names", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="benchmarks to write (default: all)")
    add("--from", dest="source", type=Path, metavar="DIR", help="folder with NAME.jsonl, … to read, not the Hub")
    add("--instruction", default=INSTRUCTION, metavar="TEXT", help="appended to each question")
    benchmarks.set_defaults(run=_benchmarks)

    for command in (smollm2, tiny, task, math, benchmarks):
        command.add_argument("--output", required=True, type=Path, metavar="DIR")
    return parser


def _prepare(args: argparse.Namespace) -> None:
    output = args.output.expanduser()
    if not output.exists():
        check_output("--output", output)
    print(args.run(args))


def _task(args: argparse.Namespace) -> Path:
    names = ("task", "instruction", "system", "question_form", "examples")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.task_config is not None:
        problem = "is not a JSON object"
        try:
            given["task_config"] = json.loads(args.task_config)
        except ValueError as error:
            problem = f"is not JSON ({error})"
        if not isinstance(given.get("task_config"), dict):
            raise ValueError(f"--task-config {args.task_config!r} {problem}: write it as '{{\"max_digits\": 2}}'")
    settings = {**PRESETS.get(args.preset, {}), **given}
    if "task" not in settings:
        raise ValueError(f"name a task with --task, or a preset ({', '.join(sorted(PRESETS))}) with --preset")
    settings |= {name: getattr(args, name) for name in ("train_size", "eval_size", "seed", "train_rows")}
    return write_task_files(output_dir=args.output, **settings)


def _math(args: argparse.Namespace) -> Path:
    names = ("problem_key", "answer_key", "answer_after", "instruction", "system", "eval_size", "seed")
    settings = {name: getattr(args, name) for name in names}
    directory, counts = write_math_files(load_table(args.source, args.config, args.split), args.output, **settings)
    print(counts, file=sys.stderr)
    return directory


def _benchmarks(args: argparse.Namespace) -> Path:
    directory, counts = write_benchmarks(args.names, args.output, args.source, args.instruction)
    print(counts, file=sys.stderr)
    return directory


if __name__ == "__main__":
    sys.exit(main())
