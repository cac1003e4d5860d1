"""`python3 -m openrlhf_gtpo.cli.plan --model DIR --gpus 32 --gpu h100-80g --nodes 4`: does it fit, and how fast?

Plans a model's training on a cluster without using it. For every legal layout and precision, predicts a GPU's memory
by part, a step's time by phase and what breaks first. --emit writes the launch script of the best one. Needs no GPU,
network or training libraries. docs/results/planner.md shows how accurate the numbers are.
"""

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.errors import SettingError, UsageError
from openrlhf_gtpo.megatron.fp8.options import RECIPES
from openrlhf_gtpo.megatron.parallel.layout import RECOMPUTE
from openrlhf_gtpo.model_shape import HUB, PRESETS
from openrlhf_gtpo.platform.files import check_output, replace_text
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.tools.planner import measured, output
from openrlhf_gtpo.tools.planner.assumptions import SOURCES, Assumptions
from openrlhf_gtpo.tools.planner.candidate import PLACEMENTS, Candidate
from openrlhf_gtpo.tools.planner.cluster import GIB, GPUS, parse_cluster
from openrlhf_gtpo.tools.planner.plan import Request, candidates, planned_config, smallest_cluster
from openrlhf_gtpo.tools.planner.workload import Workload

TRAIN_BATCH = 128  # as in the launch scripts


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan. Return 0, or 2 after one sentence on stderr if there is none, as when the model fits nowhere."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)

    def plan() -> None:
        try:
            _plan(args, words)
        except SettingError as error:
            raise UsageError(error.with_flags(_flag)) from error

    return exit_status("plan", plan, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.plan", description=__doc__)
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}
    searched = "(default: searched)"
    parser.add_argument(
        "--model",
        required=True,
        help="folder of a Hugging Face checkpoint, its config.json, a Qwen2.5 name on the Hub, or 3b, 7b, 32b",
    )

    add = parser.add_argument_group("cluster").add_argument
    add("--gpus", required=True, help="GPUs of all nodes together", **count)
    add("--gpu", default="h100-80g", help=f"one of {', '.join(GPUS)}")
    add("--nodes", help="number of equal nodes (default: nodes of 8 GPUs)", **count)
    add("--network-gbit", default=400, help="Gbit/s from each GPU to other nodes", **number)

    add = parser.add_argument_group(
        "workload", "defaults as in the presets of train.sh, except --max-tokens-per-gpu"
    ).add_argument
    work = Workload()
    add("--prompt-length", default=work.prompt_length, help="maximum tokens of a prompt", **count)
    add("--response-length", default=work.response_length, help="maximum tokens of a response", **count)
    add("--mean-prompt", help="mean tokens of a prompt (default: half the maximum)", **number)
    add("--mean-response", help="mean tokens of a response (default: log-normal, median maximum / 6)", **number)
    add("--samples-per-prompt", default=work.samples_per_prompt, help="responses per prompt", **count)
    add("--prompts-per-step", default=work.prompts_per_step, help="prompts per rollout", **count)
    smaller = f"(default: {TRAIN_BATCH}, or all if a step has fewer)"
    add("--train-batch", help=f"responses per optimizer step {smaller}", **count)
    run_help = "metrics of a run with these settings: plan its mean lengths, and compare its seconds with the plan's"
    add("--run", type=Path, metavar="DIR_OR_FILE", help=run_help)
    tokens = work.max_tokens_per_gpu
    add(
        "--max-tokens-per-gpu",
        default=tokens,
        help=f"maximum tokens of a micro-batch on each GPU (default: {tokens}, or one longest row)",
        **count,
    )
    add("--kl", action="store_true", help="score the responses with a reference model too")
    source: dict[str, Any] = {"choices": ("actor", "sampler"), "default": "actor"}
    add("--entropy", help="the trainer's --rollout.entropy (default: actor)", **source)
    add("--log-probs", help="the trainer's --rollout.log_probs (default: actor)", **source)

    add = parser.add_argument_group("choices", "whatever is not given is searched").add_argument
    for name in ("tensor", "pipeline", "context", "expert"):
        add(f"--{name}-parallel", help=searched, **count)
    add("--fp8", choices=("off", "hybrid", "e4m3"), help=f"FP8 mode of the actor's matrix products {searched}")
    add("--fp8-recipe", choices=RECIPES, help=searched)
    add("--fp8-param", action="store_true", help="FP8 primary weights")
    add("--recompute", choices=RECOMPUTE, help=searched)
    add("--lora-rank", type=int, default=0, metavar="R", help="train adapters of this rank (default: all weights)")
    add("--placement", choices=PLACEMENTS, default=PLACEMENTS[0], help="placement of engines and training")
    add("--rollout-gpus", help=f"GPUs of the engines with --placement split {searched}", **count)
    add("--async-enable", action="store_true", help="sample during training; only with --placement split")
    add("--vllm-tensor-parallel", help=searched, **count)
    add("--vllm-gpu-memory", help="fraction of each GPU's memory for vLLM (default: 0.6; split 0.85)", **number)
    moved = "move the trainer's memory to the host during rollouts, and put engines to sleep"
    add("--offload", help=f"{moved} (default: yes; only with --placement colocated)", **switch)
    add("--distributed-optimizer", help="shard the optimizer's states (default: yes)", **switch)

    add = parser.add_argument_group("output").add_argument
    add("--top", default=8, help="candidates to list", **count)
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--assumptions", action="store_true", help="print each assumption with its source")
    add(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace an assumption, such as by a measured value, or overlap=0; may be repeated",
    )
    add("--emit", type=Path, metavar="FILE", help="write the launch script of the best candidate")
    add("--algorithm", choices=output.ALGORITHMS, default="gtpo", help="algorithm of that script")
    return parser


def _flag(name: str) -> str:
    """Return a setting's flag: --tensor-parallel for tensor_model_parallel_size, --fp8-recipe for fp8_recipe."""
    return "--" + re.sub("(_model)?_parallel_size", "_parallel", name).replace("_", "-")


def _plan(args: argparse.Namespace, words: list[str]) -> None:
    check_output("--emit", args.emit)
    if args.emit is not None and args.emit.exists() and "openrlhf_gtpo.cli.plan" not in args.emit.read_text("latin-1"):
        raise UsageError(f"--emit {args.emit} exists and was not written by this command; name another file.")
    if args.emit is not None and args.placement == "colocated" and not args.offload:
        raise UsageError(
            "--emit writes a script for the launcher, which always offloads for colocated engines; drop --no-offload."
        )
    run = {} if args.run is None else _seconds_of_run(args)
    request = _request(args)
    ranked = candidates(request)
    best = ranked[0]
    if args.json:
        listed = [output.as_json(candidate) for candidate in ranked[: args.top]]
        printed = {"assumptions": asdict(request.assumptions), "candidates": listed, "measured": run}
        print(json.dumps(printed, indent=1))
    else:
        _print(args, request, ranked)
        if run and best.engines.fits:
            print(f"\n{args.run} (median) beside {output.layout_words(best)}:\n{output.beside(best, run)}")
    if not best.fits:
        raise UsageError(_nowhere(args, request, best))
    if args.emit is not None:
        model, command = _model(args.model), _command(words)
        args.emit.parent.mkdir(parents=True, exist_ok=True)
        replace_text(args.emit, output.launch_script(best, algorithm=args.algorithm, model=model, command=command))
        args.emit.chmod(0o755)
        if not args.json:
            print(
                f"\nwrote {args.emit}; from the project's root: bash {shlex.quote(str(args.emit.resolve()))} --dry-run"
            )


def _seconds_of_run(args: argparse.Namespace) -> dict[str, float]:
    """Read the run's seconds by phase, and set the mean lengths that are not given to the run's.

    Raises:
        UsageError: no step can be read, or the run has other numbers of responses than the plan.
    """
    try:
        rows = read_runs(args.run)[-1]
        responses, prompt, response = measured.workload(rows)
    except ValueError as error:
        raise UsageError(f"--run {args.run}: {error}") from error
    planned = args.samples_per_prompt * args.prompts_per_step
    if responses != planned:
        raise UsageError(
            f"--run {args.run} trained on {responses} responses a step and the plan has {planned}; "
            "give its --samples-per-prompt and --prompts-per-step."
        )
    args.mean_prompt, args.mean_response = args.mean_prompt or prompt, args.mean_response or response
    return measured.seconds(rows)


def _request(args: argparse.Namespace) -> Request:
    for name, value in vars(args).items():
        least = 0 if name == "lora_rank" else 1
        if type(value) is int and value < least:
            raise SettingError(f"Expected ${name} >= {least}, got {value}.")
    for given, setting in ((args.fp8_recipe, f"$fp8_recipe {args.fp8_recipe}"), (args.fp8_param, "$fp8_param")):
        if args.fp8 == "off" and given:
            raise SettingError(f"{setting} needs FP8, but $fp8 is off; leave one of them out.")
    if args.rollout_gpus is not None and args.placement != "split":
        raise SettingError("$rollout_gpus needs $placement split; colocated engines run on all GPUs.")
    if args.async_enable and args.placement != "split":
        raise SettingError("$async_enable needs $placement split; colocated engines take turns with the trainer.")
    if args.vllm_gpu_memory is not None and not 0 < args.vllm_gpu_memory < 1:
        raise SettingError(f"Expected 0 < $vllm_gpu_memory < 1, a share of the memory, got {args.vllm_gpu_memory:g}.")
    train_batch = args.train_batch or min(TRAIN_BATCH, args.samples_per_prompt * args.prompts_per_step)
    given = vars(args) | {"train_batch": train_batch, "vllm_memory": args.vllm_gpu_memory}
    given |= {name: given[f"{name}_parallel"] for name in ("tensor", "pipeline", "context", "expert", "vllm_tensor")}
    given["colocated"] = args.placement == "colocated"
    try:
        given["config"] = planned_config(args.model)
    except ValueError as error:
        raise UsageError(f"--model {args.model}: {error}") from error
    given["cluster"] = parse_cluster(args.gpu, args.gpus, args.nodes, args.network_gbit)
    given["workload"] = Workload(**{field.name: given[field.name] for field in fields(Workload)})
    given["assumptions"] = _assumptions(args.assume)
    return Request(**{field.name: given[field.name] for field in fields(Request)})


def _assumptions(words: list[str]) -> Assumptions:
    values = {}
    for word in words:
        name, _, text = word.partition("=")
        value = math.nan
        with suppress(ValueError):
            value = float(text)
        is_number = 0 < value < math.inf or (value == 0 and name == "overlap")
        if name not in SOURCES or not is_number or (kind := type(getattr(Assumptions, name)))(value) != value:
            raise UsageError(f"--assume {word}: expected NAME=NUMBER, as --assumptions lists them.")
        values[name] = kind(value)
    return Assumptions(**values)


def _model(name: str) -> str:
    """Return the value of ``--model`` for the launcher, which runs from the project's root."""
    path, of_preset = Path(name).resolve(), {preset: of_hub for of_hub, preset in HUB.items()}
    if name in PRESETS or not path.exists():
        return of_preset.get(name, name)
    return str(path.parent if path.is_file() else path)


def _command(words: list[str]) -> str:
    """Return the planner's command line without the flag that writes the script."""
    kept = [word for i, word in enumerate(words) if word != "--emit" and (i == 0 or words[i - 1] != "--emit")]
    kept = [word for word in kept if not word.startswith("--emit=")]
    return shlex.join(["python3", "-m", "openrlhf_gtpo.cli.plan", *kept])


def _print(args: argparse.Namespace, request: Request, ranked: list[Candidate]) -> None:
    work, cluster = request.workload, request.cluster
    fitting = sum(candidate.fits for candidate in ranked)
    print(
        f"{args.model} on {cluster.gpus} × {cluster.gpu.name} in {cluster.nodes} node{'s' * (cluster.nodes > 1)}, "
        f"{args.placement}: {len(ranked)} candidate{'s' * (len(ranked) > 1)}, {fitting} fit{'s' * (fitting == 1)}\n"
        f"a step: {work.prompts_per_step} prompts × {work.samples_per_prompt} responses, "
        f"prompts of {work.prompt:.0f} and responses of {work.response:.0f} tokens on average "
        f"(at most {work.prompt_length} and {work.response_length})\n"
    )
    print(output.ranking(ranked, args.top))
    print(f"\n{'best' if fitting else 'nearest'}: {output.details(ranked[0])}")
    for line in _rests_on(request, ranked):
        print(line)
    if work.entropy == "sampler" and work.optimizer_steps > 1 and work.log_probs == "actor":
        print(
            f"--entropy sampler saves no time: a rollout's {work.optimizer_steps} optimizer steps need the actor's "
            "forward for its log-probs (--log-probs)"
        )
    if not args.assumptions and args.run is None:
        print("times are computed from assumed efficiencies (see --assumptions), not measured on this cluster")
    if not args.assumptions:
        return
    print("\nassumed:")
    for name, value in asdict(request.assumptions).items():
        shown = f"{value / GIB:.1f} GiB" if name.endswith("_bytes") else f"{value:g}"
        print(f"  {name:20}{shown:>10}  {SOURCES[name]}")


def _rests_on(request: Request, ranked: list[Candidate]) -> Iterator[str]:
    """Yield a line for each assumption that decides the best candidate: the responses' length, and FP8's gain."""
    best, work = ranked[0], request.workload
    training = best.training
    if best.fits and work.mean_response is None:
        longer = replace(work, mean_response=work.response_length)
        count, _ = longer.micro_batches(training.data_parallel, training.layout.context_parallel_size)
        training, engines = replace(training, micro_batches=count), replace(best.engines, workload=longer)
        longest = replace(best, training=training, engines=engines)
        yield (
            f"assumed: responses of {work.response:.0f} of {work.response_length} tokens on average, "
            f"{best.step_seconds:.0f} s a step; at {work.response_length} the same layout takes "
            f"{longest.step_seconds:.0f} s (--mean-response)"
        )
    in_bf16 = next((plan for plan in ranked if plan.fits and plan.training.fp8 is None), None)
    if best.fits and best.training.fp8 and in_bf16:
        gain = in_bf16.step_seconds / best.step_seconds
        yield (
            f"the best in BF16, {output.layout_words(in_bf16)}, takes {in_bf16.step_seconds:.0f} s: the plan assumes "
            f"that FP8 gains {gain:.2f} ×"
        )


def _nowhere(args: argparse.Namespace, request: Request, nearest: Candidate) -> str:
    phase, over = nearest.breaks
    sentence = (
        f"{args.model} fits nowhere on {request.cluster.gpus} × {request.cluster.gpu.name}: the nearest, "
        f"{output.layout_words(nearest)}, is {over / GIB:.1f} GiB over in its {phase} phase"
    )
    best = smallest_cluster(request)
    if best is None:
        return (
            f"{sentence}, and more of these GPUs do not help; plan for shorter responses, a lower "
            "--max-tokens-per-gpu or GPUs with more memory."
        )
    larger = f"has {best.gpus} GPUs ({output.layout_words(best)})"
    return f"{sentence}; the smallest cluster of these GPUs on which it fits {larger}."


if __name__ == "__main__":
    sys.exit(main())
