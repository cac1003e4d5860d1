"""``python3 -m openrlhf_gtpo.cli.benchmark NAME``: measurements whose numbers the documentation quotes."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.benchmarks.trainer_process import TrainerFailed
from openrlhf_gtpo.cli import (
    benchmark_actor,
    benchmark_layers,
    benchmark_lm_head,
    benchmark_train,
    benchmark_train_step,
    benchmark_weight_sync,
)
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.results import write_results


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; 0, 2 after one sentence for a mistake in the command line, or 1 where a training run failed."""
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
    benchmark_actor.add(commands)
    benchmark_lm_head.add(commands)
    benchmark_weight_sync.add(commands)
    benchmark_layers.add(commands)
    benchmark_train_step.add(commands)
    benchmark_train.add(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except UsageError as error:
        print(f"benchmark {args.command}: {error}", file=sys.stderr)
        return 2
    except TrainerFailed as error:
        print(f"benchmark {args.command}: {error}", file=sys.stderr)
        return 1
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

    from openrlhf_gtpo.benchmarks.overhead import VARIANTS, measure, ratio

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


if __name__ == "__main__":
    sys.exit(main())
