"""``python3 -m openrlhf_gtpo.cli.benchmark overhead|actor|lm-head|weight-sync``: measurements whose numbers the documentation quotes."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.cli import benchmark_lm_head, benchmark_weight_sync
from openrlhf_gtpo.integration.errors import UsageError
from openrlhf_gtpo.report.results import write_results


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; 0, or 2 after one sentence for a mistake in the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m openrlhf_gtpo.cli.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    overhead = commands.add_parser("overhead", help="a GTPO step against upstream's group_norm step, same batches")
    overhead.add_argument("--model", required=True, help="Hugging Face checkpoint")
    overhead.add_argument("--prompts", type=int, default=8, help="prompts in a batch (default: %(default)s)")
    overhead.add_argument("--samples", type=int, default=8, help="responses to each (default: %(default)s)")
    overhead.add_argument("--prompt-tokens", type=int, default=48)
    overhead.add_argument("--response-tokens", type=int, default=32)
    overhead.add_argument("--micro-batch-size", type=int, default=16)
    overhead.add_argument("--repeat", type=int, default=7, help="counted steps of each variant (default: %(default)s)")
    overhead.add_argument("--output", type=Path, help="write the timings to this JSON file")
    overhead.set_defaults(run=_overhead)
    actor = commands.add_parser("actor", help="the DeepSpeed actor against the Megatron actor, same ragged batches")
    actor.add_argument("--model", required=True, help="Hugging Face checkpoint")
    actor.add_argument("--rows", type=int, default=32, help="responses in a batch (default: %(default)s)")
    actor.add_argument("--prompt-tokens", type=int, default=64, help="(default: %(default)s)")
    actor.add_argument("--response-tokens", type=int, default=512, help="limit of a response (default: %(default)s)")
    actor.add_argument("--micro-batch-size", type=int, default=8, help="rows, for DeepSpeed (default: %(default)s)")
    actor.add_argument(
        "--max-tokens", type=int, default=2048, help="a micro-batch, for Megatron (default: %(default)s)"
    )
    actor.add_argument("--repeat", type=int, default=5, help="counted batches (default: %(default)s)")
    actor.add_argument("--seed", type=int, default=1)
    actor.add_argument("--output", type=Path, help="write the timings to this JSON file")
    actor.add_argument("trainer_flags", nargs="*", metavar="-- FLAG", help="further flags of the trainer, for both")
    actor.set_defaults(run=_actor)
    benchmark_lm_head.add(commands)
    benchmark_weight_sync.add(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except UsageError as error:
        print(f"benchmark {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _overhead(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.integration import run

    rows = args.prompts * args.samples
    flags = {
        "--actor.model_name_or_path": args.model,
        "--actor.num_gpus_per_node": 1,
        "--rollout.batch_size": args.prompts,
        "--rollout.n_samples_per_prompt": args.samples,
        "--rollout.micro_batch_size": args.micro_batch_size,
        "--train.batch_size": rows,
        "--train.micro_batch_size": args.micro_batch_size,
        "--data.max_len": args.prompt_tokens + args.response_tokens,
        "--algo.kl.init_coef": 0,
        "--reward.remote_url": "none",
    }
    argv = [str(word) for pair in flags.items() for word in pair]
    run.parse([*argv, "--algo.advantage.estimator", "group_norm"])  # guard and platform before upstream is imported

    from openrlhf_gtpo.integration.overhead import VARIANTS, measure, ratio

    timings = measure(argv, args.prompt_tokens, args.response_tokens, args.repeat)
    print(f"{'variant':12} {'experience s':>13} {'train s':>9} {'step s':>8}   medians of {args.repeat} steps")
    for variant in VARIANTS:
        medians = [
            statistics.median(x) for x in (timings[variant].experience, timings[variant].train, timings[variant].step)
        ]
        print(f"{variant:12} {medians[0]:13.2f} {medians[1]:9.2f} {medians[2]:8.2f}")
    ratios = {}
    for base in VARIANTS[:2]:
        low, median, high = ratios[f"gtpo/{base}"] = ratio(timings, "gtpo", base)
        print(f"gtpo / {base}: {median:.3f} (from {low:.3f} to {high:.3f}, batch by batch)")
    if args.output:
        write_results(args.output, args, {"seconds": {name: vars(t) for name, t in timings.items()}, "ratios": ratios})


def _actor(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.integration import run

    flags = {
        "--actor.model_name_or_path": args.model,
        "--actor.num_gpus_per_node": 1,
        "--algo.advantage.estimator": "gtpo",
        "--rollout.batch_size": args.rows // 2,
        "--rollout.n_samples_per_prompt": 2,
        "--rollout.micro_batch_size": args.micro_batch_size,
        "--train.batch_size": args.rows // 2 * 2,
        "--train.micro_batch_size": args.micro_batch_size,
        "--train.max_tokens_per_gpu": args.max_tokens,
        "--data.max_len": args.prompt_tokens + args.response_tokens,
        "--algo.kl.init_coef": 0,
        "--reward.remote_url": "none",
        "--vllm.num_engines": 1,  # counted, not started
    }
    argv = [*(str(word) for pair in flags.items() for word in pair), *args.trainer_flags]
    run.parse(argv)  # guard and platform before upstream is imported

    from openrlhf_gtpo.integration.actor_benchmark import BACKENDS, measure

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


if __name__ == "__main__":
    sys.exit(main())
