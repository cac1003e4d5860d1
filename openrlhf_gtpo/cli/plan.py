"""`python3 -m openrlhf_gtpo.cli.plan --model DIR --gpus 32 --gpu h100-80g --nodes 4`: whether it fits, and how fast it is.

Plans the training of a model on a cluster that need not be at hand: for every legal layout and precision the memory of a
GPU by part and the time of a step by phase, what breaks first, and the best, whose launch script --emit writes. Needs no
GPU, no network and none of the libraries that train. docs/planner.md says how far its numbers can be trusted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import RECIPES
from openrlhf_gtpo.model_shape import PRESETS
from openrlhf_gtpo.planner import emit, table
from openrlhf_gtpo.planner.activations import RECOMPUTE
from openrlhf_gtpo.planner.assumptions import SOURCES, Assumptions
from openrlhf_gtpo.planner.candidate import PLACEMENTS
from openrlhf_gtpo.planner.cluster import GIB, GPUS, parse_cluster
from openrlhf_gtpo.planner.layouts import Asked
from openrlhf_gtpo.planner.model_config import model_config, read_model_config
from openrlhf_gtpo.planner.plan import Request, candidates, smallest_cluster
from openrlhf_gtpo.planner.workload import Workload

TRAIN_BATCH = 128  # the launch scripts'
_HUB = {"3b": "Qwen/Qwen2.5-3B", "7b": "Qwen/Qwen2.5-7B", "32b": "Qwen/Qwen2.5-32B"}


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; 0, or 2 after one sentence on stderr for what cannot be planned, a model that fits nowhere among it."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    try:
        _plan(args, words)
    except UsageError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m openrlhf_gtpo.cli.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, help="folder of a Hugging Face checkpoint, its config.json, or 3b, 7b, 32b (Qwen2.5)"
    )
    group = parser.add_argument_group("cluster")
    group.add_argument("--gpus", type=int, required=True, metavar="N", help="in all nodes together")
    group.add_argument("--gpu", default="h100-80g", help=f"one of {', '.join(GPUS)} (default: %(default)s)")
    group.add_argument("--nodes", type=int, metavar="N", help="equal ones (default: of 8 GPUs)")
    group.add_argument(
        "--network-gbit",
        type=float,
        default=400,
        metavar="X",
        help="Gbit/s of each GPU to other nodes (default: %(default)s)",
    )
    _add_workload(parser)
    _add_choices(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=int, default=8, metavar="N", help="candidates to list (default: %(default)s)")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    group.add_argument("--assumptions", action="store_true", help="print what is assumed, and where it comes from")
    group.add_argument("--emit", type=Path, metavar="FILE", help="write the launch script of the best candidate")
    group.add_argument(
        "--algorithm", choices=emit.ALGORITHMS, default="gtpo", help="of that script (default: %(default)s)"
    )
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload", "the defaults are the paper's settings")
    defaults = Workload()
    group.add_argument(
        "--prompt-length",
        type=int,
        default=defaults.prompt_length,
        metavar="N",
        help="most tokens (default: %(default)s)",
    )
    group.add_argument(
        "--response-length",
        type=int,
        default=defaults.response_length,
        metavar="N",
        help="most tokens (default: %(default)s)",
    )
    group.add_argument("--mean-prompt", type=float, metavar="X", help="tokens (default: half of the most)")
    group.add_argument(
        "--mean-response",
        type=float,
        metavar="X",
        help="tokens (default: of a log-normal with a median of a sixth of the most)",
    )
    group.add_argument(
        "--samples-per-prompt",
        type=int,
        default=defaults.samples_per_prompt,
        metavar="N",
        help="(default: %(default)s)",
    )
    group.add_argument(
        "--prompts-per-step", type=int, default=defaults.prompts_per_step, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--train-batch",
        type=int,
        metavar="N",
        help=f"responses in an optimizer step (default: {TRAIN_BATCH}, or all of a smaller step)",
    )
    group.add_argument(
        "--max-tokens-per-gpu", type=int, metavar="N", help="of a micro-batch (default: 16192, or one longest row)"
    )
    group.add_argument("--kl", action="store_true", help="a reference model scores the responses too")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("choices", "what is left out is searched")
    for name in ("tensor", "pipeline", "context", "expert"):
        group.add_argument(f"--{name}-parallel", type=int, metavar="N")
    group.add_argument("--fp8", choices=("off", "hybrid", "e4m3"), help="of the actor's products")
    group.add_argument("--fp8-recipe", choices=RECIPES)
    group.add_argument("--fp8-param", action="store_true", help="FP8 primary weights")
    group.add_argument("--recompute", choices=RECOMPUTE)
    group.add_argument("--placement", choices=PLACEMENTS, default=PLACEMENTS[0], help="(default: %(default)s)")
    group.add_argument("--rollout-gpus", type=int, metavar="N", help="GPUs of the engines with --placement split")
    group.add_argument("--vllm-tensor-parallel", type=int, metavar="N")
    group.add_argument(
        "--vllm-gpu-memory", type=float, metavar="X", help="share of each GPU's memory (default: 0.6; split 0.85)"
    )
    group.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="move the trainer's memory to the host during rollouts, and put engines to sleep (default: yes; colocated alone)",
    )
    group.add_argument(
        "--distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard its states (default: yes)",
    )


def _plan(args: argparse.Namespace, words: list[str]) -> None:
    request = _request(args)
    found = candidates(request)
    best = found[0]
    if args.json:
        fitting = [table.as_json(one) for one in found[: args.top]]
        print(json.dumps({"assumptions": asdict(request.assumptions), "candidates": fitting}, indent=1))
    else:
        _print(args, request, found)
    if not best.fits:
        raise UsageError(_nowhere(args, request, found))
    if args.emit is not None:
        job = emit.Job(_HUB.get(args.model, args.model), emit.command_of(words), args.algorithm)
        args.emit.parent.mkdir(parents=True, exist_ok=True)
        args.emit.write_text(emit.script(best, job))
        args.emit.chmod(0o755)
        if not args.json:
            print(f"\nwrote {args.emit}; from the project's root: bash {args.emit} --dry-run")


def _request(args: argparse.Namespace) -> Request:
    for flag in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "top"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value} must be at least 1.")
    for given, flag in ((args.fp8_recipe, f"--fp8-recipe {args.fp8_recipe}"), (args.fp8_param, "--fp8-param")):
        if args.fp8 == "off" and given:
            raise UsageError(f"{flag} needs FP8, and --fp8 is off; leave one of them out.")
    if args.rollout_gpus is not None and args.placement != "split":
        raise UsageError("--rollout-gpus needs --placement split; colocated engines run on all GPUs.")
    if args.vllm_gpu_memory is not None and not 0 < args.vllm_gpu_memory < 1:
        raise UsageError(
            f"--vllm-gpu-memory {args.vllm_gpu_memory:g} is a share of the memory; give one between 0 and 1."
        )
    return Request(
        config=_config(args.model),
        cluster=parse_cluster(args.gpu, args.gpus, args.nodes, args.network_gbit),
        workload=Workload(
            prompt_length=args.prompt_length,
            response_length=args.response_length,
            mean_prompt=args.mean_prompt,
            mean_response=args.mean_response,
            samples_per_prompt=args.samples_per_prompt,
            prompts_per_step=args.prompts_per_step,
            train_batch=args.train_batch or min(TRAIN_BATCH, args.samples_per_prompt * args.prompts_per_step),
            max_tokens=args.max_tokens_per_gpu,
            kl=args.kl,
        ),
        asked=Asked(
            tensor=args.tensor_parallel,
            pipeline=args.pipeline_parallel,
            context=args.context_parallel,
            expert=args.expert_parallel,
            fp8=args.fp8,
            fp8_recipe=args.fp8_recipe,
            fp8_param=args.fp8_param,
            recompute=args.recompute,
            vllm_tensor=args.vllm_tensor_parallel,
        ),
        colocated=args.placement == "colocated",
        rollout_gpus=args.rollout_gpus,
        offload=args.offload,
        distributed_optimizer=args.distributed_optimizer,
        vllm_memory=args.vllm_gpu_memory,
    )


def _config(model: str) -> SimpleNamespace:
    if model in PRESETS:
        return model_config(PRESETS[model], model)
    return read_model_config(model)


def _print(args: argparse.Namespace, request: Request, found: list) -> None:
    work, cluster = request.workload, request.cluster
    fitting = sum(one.fits for one in found)
    print(
        f"{args.model} on {cluster.gpus} × {cluster.gpu.name} in {cluster.nodes} node{'s' * (cluster.nodes > 1)}, {args.placement}: "
        f"{len(found)} candidates, {fitting} fit\n"
        f"a step: {work.prompts_per_step} prompts × {work.samples_per_prompt} responses, prompts of {work.prompt:.0f} and "
        f"responses of {work.response:.0f} tokens on average (most {work.prompt_length} and {work.response_length})\n"
    )
    print(table.ranking(found, args.top))
    print(f"\n{'best' if fitting else 'nearest'}: {table.details(found[0])}")
    if args.assumptions:
        print("\nassumed:")
        for name, value in asdict(Assumptions()).items():
            shown = f"{value / GIB:.1f} GiB" if name.endswith("_bytes") else f"{value:g}"
            print(f"  {name:20}{shown:>10}  {SOURCES[name]}")
    else:
        print(
            "times rest on assumed efficiencies (--assumptions lists them); nothing here was measured on this cluster"
        )


def _nowhere(args: argparse.Namespace, request: Request, found: list) -> str:
    phase, over = found[0].breaks
    sentence = (
        f"{args.model} fits nowhere on {request.cluster.gpus} × {request.cluster.gpu.name}: the nearest, "
        f"{table.layout_words(found[0])}, is {over / GIB:.1f} GiB over in its {phase} phase"
    )
    larger = smallest_cluster(request)
    if larger is None:
        return f"{sentence}, and no number of these GPUs helps; take shorter responses, a lower --max-tokens-per-gpu or a GPU with more memory."
    cluster, best = larger
    return f"{sentence}; the smallest cluster of them on which it would fit has {cluster.gpus} GPUs ({table.layout_words(best)})."


if __name__ == "__main__":
    sys.exit(main())
