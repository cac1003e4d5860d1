"""``benchmark actor``: the DeepSpeed actor against the Megatron actor, and the trainer's flags that measure either."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_gtpo.report.results import write_results


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser("actor", help="the DeepSpeed actor against the Megatron actor, same ragged batches")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint")
    parser.add_argument("--rows", type=int, default=32, help="responses in a batch (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--response-tokens", type=int, default=512, help="limit of a response (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="rows, for DeepSpeed (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=2048, help="a micro-batch, for Megatron (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="counted batches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the timings to this JSON file")
    parser.add_argument("trainer_flags", nargs="*", metavar="-- FLAG", help="further flags of the trainer, for both")
    parser.set_defaults(run=_run)


def trainer_argv(
    model: str,
    *,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: int,
    micro_batch_size: int,
    max_tokens: int,
    further: Sequence[str] = (),
) -> list[str]:
    """The flags of a trainer whose actor ``integration.actor_benchmark`` measures; parsed already, which guards the
    versions and prepares the platform before upstream is imported.

    Raises:
        UsageError: what the parser refuses.
    """
    from openrlhf_gtpo.integration import run

    flags = {
        "--actor.model_name_or_path": model,
        "--actor.num_gpus_per_node": 1,
        "--algo.advantage.estimator": "gtpo",
        "--rollout.batch_size": prompts,
        "--rollout.n_samples_per_prompt": samples,
        "--rollout.micro_batch_size": micro_batch_size,
        "--train.batch_size": prompts * samples,
        "--train.micro_batch_size": micro_batch_size,
        "--train.max_tokens_per_gpu": max_tokens,
        "--data.max_len": prompt_tokens + response_tokens,
        "--algo.kl.init_coef": 0,
        "--reward.remote_url": "none",
        "--vllm.num_engines": 1,  # counted, not started
    }
    argv = [*(str(word) for pair in flags.items() for word in pair), *further]
    run.parse(argv)
    return argv


def _run(args: argparse.Namespace) -> None:
    argv = trainer_argv(
        args.model,
        prompts=args.rows // 2,
        samples=2,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        micro_batch_size=args.micro_batch_size,
        max_tokens=args.max_tokens,
        further=args.trainer_flags,
    )

    from openrlhf_gtpo.benchmarks.actor import BACKENDS, measure

    measured = measure(argv, args.prompt_tokens, args.response_tokens, args.repeat, args.seed)
    print(
        f"{'backend':10} {'forward tok/s':>14} {'train tok/s':>12} {'peak GB':>8}   medians of {args.repeat} batches"
    )
    for backend in BACKENDS:
        side = measured[backend]
        speeds = [
            statistics.median(tokens / seconds for tokens, seconds in zip(side.tokens, phase, strict=True))
            for phase in (side.forward, side.train)
        ]
        print(f"{backend:10} {speeds[0]:14,.0f} {speeds[1]:12,.0f} {side.peak_bytes / 2**30:8.2f}")
    ratios = {}
    for phase in ("forward", "train"):
        pairs = [a / b for a, b in zip(*(getattr(measured[backend], phase) for backend in BACKENDS), strict=True)]
        ratios[phase] = min(pairs), statistics.median(pairs), max(pairs)
        low, median, high = ratios[phase]
        print(
            f"{phase}: megatron is {median:.2f}x as fast as deepspeed (from {low:.2f} to {high:.2f}, batch by batch)"
        )
    if args.output:
        write_results(
            args.output, args, {"measured": {name: vars(side) for name, side in measured.items()}, "ratios": ratios}
        )
