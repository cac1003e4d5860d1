"""The cost of GTPO: the same batches with upstream's group_norm and with GTPO.

A step is the part that depends on the algorithm: old-policy forward pass, shaping and training. Sampling and weight
sync are the same for all and would only dilute the ratio. Three policies run as real Ray actors with real DeepSpeed:

* ``upstream``: OpenRLHF's own actor and ``group_norm``;
* ``group_norm``: the same estimator on this package's policy model, whose LM head skips prompts;
* ``gtpo``: this package's model with entropies and GTPO.

On a CPU host the first trains with DeepSpeed's Adam, the others with torch's.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import ray
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

from benchmarks.suite.actor import Policy, rollout, trainer_argv
from benchmarks.suite.harness import Side, measure, print_table, ratios, spread
from benchmarks.suite.results import write_results
from benchmarks.suite.synthetic import even_lengths
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training import patch
from openrlhf_gtpo.training import run as trainer
from openrlhf_gtpo.training.actors.policy_actor import EntropyPolicyActor
from openrlhf_gtpo.training.host import start_ray


class UpstreamPolicy(Policy):
    """OpenRLHF's actor, and OpenRLHF's experiences for it."""

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__(argv, PolicyModelActor)
        nothing, kl = (None, None, None), FixedKLController(0.0)
        self._upstream = RemoteExperienceMaker(self._group, *nothing, kl, self._strategy, self._tokenizer)

    def experience(self) -> None:
        samples = [row.experience(self.args.data.max_len) for row in self.rows]
        self._made = self._upstream.make_experience_batch(samples)


def run(args: argparse.Namespace) -> None:
    """Measure the three variants, and print and write the results."""
    rows = args.prompts * args.samples
    if rows % args.micro_batch_size:  # DeepSpeed rejects others under upstream's strategy
        raise UsageError(
            f"--micro-batch-size {args.micro_batch_size} does not divide the {rows} responses of a step "
            f"(--prompts {args.prompts} x --samples {args.samples}); give a divisor of {rows}."
        )
    # Three policies on the same batches.
    argv = [*trainer_argv(args, {}), "--algo.advantage.estimator"]
    parsed = trainer.parse([*argv, "group_norm"])
    start_ray(parsed, gpus=3)
    try:
        policies: dict[str, Policy] = {"upstream": UpstreamPolicy([*argv, "group_norm"])}
        patch.apply(parsed)  # replaces the DeepSpeed strategy from here on
        for name in ("group_norm", "gtpo"):
            policies[name] = Policy([*argv, name], ray.remote(EntropyPolicyActor))

        def new_round(repetition: int) -> None:
            lengths = even_lengths(rows, args.response_tokens, repetition)
            for policy in policies.values():
                policy.rows = rollout(policy.args, args.prompt_tokens, lengths, repetition)

        def train(policy: Policy) -> None:
            policy.append()
            policy.fit()

        sides: dict[str, Side] = {
            name: {"experience": policy.experience, "train": partial(train, policy)}
            for name, policy in policies.items()
        }
        measured = measure(sides, args.repeat, new_round=new_round)
    finally:
        ray.shutdown()

    # Seconds of a step, and ratios of GTPO's to the others'.
    seconds = {name: side.seconds for name, side in measured.items()}
    steps = {name: [sum(parts) for parts in zip(*phases.values(), strict=True)] for name, phases in seconds.items()}
    over = {f"gtpo/{base}": spread(ratios(steps["gtpo"], steps[base])) for base in ("upstream", "group_norm")}
    medians = []
    for name in policies:
        medians.append(
            (name, *(f"{statistics.median(times):.2f}" for times in (*seconds[name].values(), steps[name])))
        )
    notes = (
        f"{name.replace('/', ' / ')}: {median:.3f} (from {low:.3f} to {high:.3f}, batch by batch)"
        for name, (low, median, high) in over.items()
    )
    print_table(f"medians of {args.repeat} steps", ("variant", "experience s", "train s", "step s"), medians, notes)
    write_results(args.output, args, {"seconds": seconds, "ratios": over})
