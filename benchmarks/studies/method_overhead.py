"""The cost of each method: a step of every estimator, and of group_norm with every surrogate, relative to group_norm
with PPO's clip, which captures no entropies.

    python3 -m benchmarks.studies.method_overhead --model MODEL --output method_overhead.json

All methods train one policy on the same rows, in turn. A step is the old-policy forward pass, shaping and training, in
seconds and in processor seconds of the two processes, which other load on the machine disturbs less.
"""

# ruff: noqa: E402

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray

from openrlhf_gtpo import platform
from openrlhf_gtpo.training.arguments import Arguments

platform.choose()  # before OpenRLHF is imported

from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import get_tokenizer

from benchmarks.suite.actor import Policy, rollout, trainer_argv
from benchmarks.suite.harness import Side, measure, median_and_range, print_table, ratios
from benchmarks.suite.results import write_results
from benchmarks.suite.synthetic import even_lengths
from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.training import patch
from openrlhf_gtpo.training import run as trainer
from openrlhf_gtpo.training.actors.policy_actor import DeepspeedActorTrainer, EntropyPolicyActor
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker, Models
from openrlhf_gtpo.training.host import start_ray

METHODS = {
    "group_norm": ["--algo.advantage.estimator", "group_norm"],
    **{name: ["--algo.advantage.estimator", name] for name in ESTIMATORS},
    **{
        f"group_norm, {name}": ["--algo.advantage.estimator", "group_norm", "--actor.policy_loss_type", name]
        for name in ("gspo", *SURROGATES)
    },
}


class MethodActor(EntropyPolicyActor):
    """A policy actor that can change its method between two phases."""

    def choose(self, args: Arguments) -> None:
        """Switch to the method of ``args``, with the same weights and optimizer."""
        self.strategy.args = self.strategy.arguments = args
        self.trainer = DeepspeedActorTrainer(
            self.strategy,
            self.actor,
            ema_model=None,
            actor_optim=self.actor_optim,
            actor_scheduler=self.actor_scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
            tokenizer=self.tokenizer,
        )

    def processor_seconds(self) -> float:
        return time.process_time()


class Method(Policy):
    """A method's arguments and experience maker, over the actor of ``policy``."""

    def __init__(self, argv: list[str], policy: Policy) -> None:
        self.args, self._group = trainer.parse(argv), policy._group
        strategy = get_strategy(self.args)
        tokenizer = get_tokenizer(self.args.actor.model_name_or_path, None, "left", strategy)
        models = Models(self._group, critic=None, reward=None, reference=None)
        self._maker = ExperienceMaker(strategy, models, FixedKLController(0.0), tokenizer)

    def choose(self) -> None:
        ray.get(self._group.async_run_method(method_name="choose", args=self.args))

    def processor_seconds(self) -> float:
        """Processor seconds of this process and the actor's so far."""
        (actor_seconds,) = ray.get(self._group.async_run_method(method_name="processor_seconds"))
        return time.process_time() + actor_seconds


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="responses to each")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--response-tokens", type=int, default=32, help="limit of a response")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS][1:], default=[*METHODS][1:], help="beside group_norm"
    )
    args = parser.parse_args()
    chosen = {name: flags for name, flags in METHODS.items() if name in ("group_norm", *args.methods)}

    # All methods share one policy in one Ray actor, and change its arguments before each call.
    argv = trainer_argv(args, {})
    load = os.getloadavg()
    parsed = trainer.parse([*argv, *METHODS["group_norm"]])
    patch.apply(parsed)
    start_ray(parsed, gpus=1)
    processor: dict[str, dict[str, list[float]]] = {name: {"experience": [], "train": []} for name in chosen}
    try:
        policy = Policy([*argv, *METHODS["group_norm"]], ray.remote(MethodActor))
        methods = {name: Method([*argv, *flags], policy) for name, flags in chosen.items()}

        def new_round(repetition: int) -> None:
            lengths = even_lengths(args.prompts * args.samples, args.response_tokens, repetition)
            for method in methods.values():
                method.rows = rollout(method.args, args.prompt_tokens, lengths, repetition)

        def timed(name: str, phase: str) -> None:
            method = methods[name]
            method.choose()
            before = method.processor_seconds()
            if phase == "experience":
                method.experience()
            else:
                method.append()
                method.fit()
            processor[name][phase].append(method.processor_seconds() - before)

        sides: dict[str, Side] = {
            name: {phase: partial(timed, name, phase) for phase in phases} for name, phases in processor.items()
        }
        measured = measure(sides, args.repeat, new_round=new_round)
    finally:
        ray.shutdown()

    # Each method relative to group_norm, by both clocks.
    results: dict[str, Any] = {}
    for name, side in measured.items():
        counted = {phase: seconds[-args.repeat :] for phase, seconds in processor[name].items()}
        results[name] = {"seconds": side.seconds, "processor_seconds": counted}
    rows, base = [], results["group_norm"]
    for name, result in results.items():
        over = []
        for clock in ("seconds", "processor_seconds"):
            step, base_step = ([sum(phases) for phases in zip(*part[clock].values())] for part in (result, base))
            result[f"{clock}_over_group_norm"] = ratios(step, base_step)
            over.append(median_and_range(ratios(step, base_step), 3))
        rows.append([name, *over])
    print_table("a step relative to group_norm's", ["method", "seconds", "processor seconds"], rows)
    write_results(args.output, args, {"load_average": [load, os.getloadavg()], "methods": results})


if __name__ == "__main__":
    main()
