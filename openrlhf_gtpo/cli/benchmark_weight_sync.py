"""``benchmark weight-sync``: GB/s of whole weight syncs into an engine, beside a device copy of the same bytes.

The trainer is one process with the full tensors, so that gathering costs nothing: what is measured is packing, transfer and
loading. OpenRLHF's own transfer, one call a parameter, is CUDA only; bucket size 0 has its number of calls.
"""

import argparse
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.results import write_results

_TRANSPORTS = ("broadcast", "colocated")


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "weight-sync", help="whole weight syncs into an engine, beside a device copy", description=__doc__
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint with safetensors")
    parser.add_argument(
        "--shape",
        metavar="LxHxIxV",
        help="instead of --model with --receiver process: a Llama of L layers, hidden and intermediate width, vocabulary",
    )
    parser.add_argument(
        "--receiver",
        choices=["vllm", "process"],
        default="vllm",
        help="an engine of vLLM's, or a process with a plain model, which needs neither vLLM nor Ray for the colocated "
        "transport (default: %(default)s)",
    )
    parser.add_argument(
        "--transport", nargs="+", choices=_TRANSPORTS, default=list(_TRANSPORTS), help="(default: both)"
    )
    parser.add_argument(
        "--bucket-mb",
        nargs="+",
        type=int,
        default=[0, 16, 64, 256],
        metavar="MIB",
        help="bucket sizes; 0 is one parameter a bucket; the last one is measured with checksums too "
        "(default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, default=1, help="tensor-parallel size of the engine (default: 1)")
    parser.add_argument("--repeat", type=int, default=7, help="counted syncs of each way (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything measured to this JSON file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    for flag, wrong in (
        (f"--repeat {args.repeat} is less than 1.", args.repeat < 1),
        (f"--workers {args.workers} is less than 1.", args.workers < 1),
        (f"--bucket-mb {min(args.bucket_mb)} is less than 0.", min(args.bucket_mb) < 0),
        ("Give one of --model and --shape.", (args.model is None) == (args.shape is None)),
        ("--shape has no weights for vLLM to load; give --receiver process, or --model.", _only_shapes(args)),
    ):
        if wrong:
            raise UsageError(flag)
    from openrlhf_gtpo.benchmarks import weight_sync as benchmark

    parameters = _parameters(args)
    _check_gpus(args)
    cases = [benchmark.Case(transport, size) for transport in args.transport for size in args.bucket_mb]
    cases += [benchmark.Case(transport, args.bucket_mb[-1], checksum=True) for transport in args.transport]
    receiver = (
        benchmark.process_engine(parameters, args.workers)
        if args.receiver == "process"
        else benchmark.vllm_engine(args.model, args.workers)
    )
    with receiver as engine:
        copies = benchmark.measure(parameters, engine, args.workers, cases, args.repeat)
    size = sum(p.numel for p in parameters) * 2
    _print(len(parameters), size, cases, copies)
    if args.output:
        results = {"bytes": size, "parameters": len(parameters), "copy_seconds": copies}
        write_results(args.output, args, {**results, "cases": [asdict(case) for case in cases]})


def _only_shapes(args: argparse.Namespace) -> bool:
    return args.shape is not None and args.receiver == "vllm"


def _parameters(args: argparse.Namespace) -> Any:
    from openrlhf_gtpo.benchmarks.weight_sync import llama_parameters, parameters_of

    if args.shape is None:
        parameters = parameters_of(args.model)
        if not parameters:
            raise UsageError(f"--model {args.model} has no *.safetensors.")
        return parameters
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", args.shape)
    if match is None:
        raise UsageError(f"--shape {args.shape!r} is not LxHxIxV, such as 32x4096x14336x128256.")
    return llama_parameters(*(int(number) for number in match.groups()))


def _check_gpus(args: argparse.Namespace) -> None:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and "broadcast" in args.transport and gpus <= args.workers:
        raise UsageError(
            f"--transport broadcast needs a GPU for the trainer beside those of {args.workers} workers, and this host "
            f"has {gpus}; give --transport colocated."
        )
    if gpus and len(args.transport) > 1:
        raise UsageError("On GPUs the transports need the trainer on different ones; give one --transport at a time.")
    if gpus and "colocated" in args.transport and args.workers > 1:
        raise UsageError(
            f"--transport colocated has one trainer process, on one GPU; --workers {args.workers} need more."
        )


def _print(count: int, size: int, cases: list[Any], copies: list[float]) -> None:
    print(f"{count} parameters, {size / 1e9:.3f} GB; medians of {len(copies)} syncs (from … to), copy = 1")
    print(f"{'way':32}{'ms':>9}{'GB/s':>8}{'':16}{'of the copy':>12}")
    rows = [("device copy", copies)]
    for case in cases:
        bucket = f"{case.bucket_mb} MiB" if case.bucket_mb else "a parameter"
        rows.append((f"{case.transport}, {bucket}{', checksum' if case.checksum else ''}", case.seconds))
    for name, seconds in rows:
        speeds = sorted(size / 1e9 / one for one in seconds)
        share = statistics.median(copy / one for copy, one in zip(copies, seconds, strict=True))
        spread = f"({speeds[0]:.2f}–{speeds[-1]:.2f})"
        print(
            f"{name:32}{statistics.median(seconds) * 1e3:9.1f}{statistics.median(speeds):8.2f} {spread:15}{share:12.4f}"
        )
