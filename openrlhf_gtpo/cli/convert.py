"""`python3 -m openrlhf_gtpo.cli.convert {hf-to-megatron,megatron-to-hf} SRC DST`: one model in either format.

A Megatron checkpoint can be read at any TP × PP × DP, whatever layout wrote it. Conversion runs on the CPU, in host
memory, even on hosts with GPUs.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from openrlhf_gtpo.checkpoints.folder import SIDE_FILES, CheckpointWriteError, check_checkpoint, resolve
from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError, check_layout
from openrlhf_gtpo.platform import PLATFORM_VARIABLE
from openrlhf_gtpo.platform.files import check_output
from openrlhf_gtpo.platform.processes import is_first_process, run_processes
from openrlhf_gtpo.training.checks.model import Model

DTYPES = ("bfloat16", "float32")
FLAGS = {"tensor_model_parallel_size": "--tensor-parallel", "pipeline_model_parallel_size": "--pipeline-parallel"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, 2 after one sentence on stderr for a user error, or 1 if a process failed."""
    args = build_parser().parse_args(argv)
    # On the CPU: host memory has room for a model that is too large for any single device. Set before anything detects
    # the platform.
    os.environ[PLATFORM_VARIABLE] = "cpu"
    return exit_status(f"convert {args.command}", lambda: _convert(args), ValueError, OSError)


def _convert(args: argparse.Namespace) -> None:
    target = args.destination
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a new folder.")
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; name a new folder.")
    if not target.exists():
        check_output("DST", target)
    args.run(args)
    if is_first_process():
        print(target)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    to_megatron = commands.add_parser("hf-to-megatron", help="convert a Hugging Face folder to a weights checkpoint")
    for kind, meaning in (("tensor", "TP of the writing processes"), ("pipeline", "PP of the writing processes")):
        to_megatron.add_argument(
            f"--{kind}-parallel", f"--{kind}-model-parallel-size", type=int, default=1, metavar="N", help=meaning
        )
    to_megatron.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as in SRC)")
    to_hf = commands.add_parser("megatron-to-hf", help="convert a weights or training checkpoint to Hugging Face")
    to_hf.add_argument("--base", metavar="MODEL", help="model of the adapters in SRC, if SRC holds only adapters")
    for command, run in ((to_megatron, _hf_to_megatron), (to_hf, _megatron_to_hf)):
        command.set_defaults(run=run)
        command.add_argument("source", type=Path, metavar="SRC")
        command.add_argument("destination", type=Path, metavar="DST", help="new or empty folder")
    return parser


def _hf_to_megatron(args: argparse.Namespace) -> None:
    model = Model(str(args.source), "SRC")
    model.check_safetensors()
    config = model.config
    try:
        # A mixture of experts on several ranks needs sequence parallelism, which changes no weight.
        layout = Layout(args.tensor_parallel, args.pipeline_parallel, sequence_parallel=True)
        check_layout(config, layout, layout.model_parallel_size)
    except LayoutError as error:
        raise ValueError(error.with_flags(lambda name: FLAGS.get(name, name))) from None
    model.check_weights()
    dtype = args.dtype or str(getattr(config, "dtype", None)).removeprefix("torch.")
    if dtype not in DTYPES:
        has = "has no dtype in its config.json"
        if dtype != "None":
            has = f"is in {dtype}, which is not a dtype for training"
        raise ValueError(f"{args.source} {has}; choose --dtype {' or '.join(DTYPES)}.")
    work = str(args.source), str(args.destination.resolve()), layout, dtype
    run_processes(hf_to_megatron, layout.model_parallel_size, *work)


def _megatron_to_hf(args: argparse.Namespace) -> None:
    source = resolve(args.source)
    manifest = check_checkpoint(source)
    adapters = manifest.get("lora")
    if adapters and args.base is None:
        raise ValueError(f"{source} has only adapters; name the model that they were trained on with --base.")
    if args.base is not None:
        if not adapters:
            raise ValueError(f"{source} has all weights, so --base has no effect; leave it out.")
        model = Model(args.base, "--base")
        model.check_safetensors()
        model.check_weights()
        from openrlhf_gtpo.lora.folder import without_comparison

        if note := without_comparison(adapters):
            print(f"{source} {note}", file=sys.stderr)
    elif not (source / SIDE_FILES / "config.json").is_file():
        raise ValueError(f"{source} has no configuration and tokenizer ({SIDE_FILES}/), which a model needs.")
    work = str(source.resolve()), str(args.destination.resolve()), manifest["dtype"], args.base
    run_processes(megatron_to_hf, 1, *work)


def hf_to_megatron(source: str, destination: str, layout: Layout, dtype: str) -> None:
    """Load ``source`` at ``layout`` and write a checkpoint of weights. Runs in each of the processes started for it;
    only they import megatron."""
    import torch

    from openrlhf_gtpo.megatron.checkpoint.checkpoints import PendingSave
    from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
    from openrlhf_gtpo.megatron.parallel import groups

    groups.initialize(layout, seed=0)
    model = load_model(source, ModelOptions(layout=layout, dtype=getattr(torch, dtype)), for_training=False)
    with _write_errors():
        PendingSave(Path(destination), model, client_state={}, hf_source=source, metric={}).finish()


def megatron_to_hf(source: str, destination: str, dtype: str, base: str | None) -> None:
    """Load the weights of the checkpoint ``source``, or ``base`` with its adapters merged, in one process, and write
    them as a Hugging Face folder."""
    import torch

    from openrlhf_gtpo.megatron.checkpoint.checkpoints import load_checkpoint, lora_options
    from openrlhf_gtpo.megatron.checkpoint.export import save_hf
    from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
    from openrlhf_gtpo.megatron.parallel import groups

    groups.initialize(Layout(), seed=0)
    model_source = base or str(Path(source) / SIDE_FILES)
    options = ModelOptions(dtype=getattr(torch, dtype), lora=lora_options(Path(source)))
    model = load_model(model_source, options, with_weights=base is not None)
    load_checkpoint(Path(source), model)
    with _write_errors():
        save_hf(model, model_source, destination)


@contextmanager
def _write_errors() -> Iterator[None]:
    """Turn a write error into a ValueError, which :func:`run_processes` passes on without a stack trace."""
    try:
        yield
    except CheckpointWriteError as error:
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
