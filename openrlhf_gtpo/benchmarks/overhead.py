"""What entropy credit costs: the same batches through upstream's group_norm and through GTPO, in one run.

A step here is what the algorithm touches: old-policy forward, shaping and training. Sampling and weight sync are the same
for all and would only dilute the ratio. Three policies live side by side as real Ray actors with real DeepSpeed:

* ``upstream``: OpenRLHF's own actor and ``group_norm``;
* ``group_norm``: the same estimator on this package's policy model, whose LM head skips prompts;
* ``gtpo``: this package's model with entropies and GTPO.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import get_tokenizer

from openrlhf_gtpo.benchmarks.synthetic import uniform_lengths
from openrlhf_gtpo.benchmarks.synthetic_rollout import rollout
from openrlhf_gtpo.integration import run
from openrlhf_gtpo.integration.actors.policy_actor import PolicyActor
from openrlhf_gtpo.integration.credit.experience_maker import EntropyExperienceMaker

VARIANTS = ("upstream", "group_norm", "gtpo")


@dataclass
class Timings:
    """Seconds of each repetition, by phase."""

    experience: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)

    @property
    def step(self) -> list[float]:
        """Experience and training together."""
        return [a + b for a, b in zip(self.experience, self.train, strict=True)]


class _Policy:
    """One variant: a group of one Ray actor and the experience maker that goes with it."""

    def __init__(self, variant: str, argv: Sequence[str]) -> None:
        # Upstream's class is taken before `run` could replace anything: this module never calls `patch.apply`.
        from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

        estimator = "gtpo" if variant == "gtpo" else "group_norm"
        args = run.parse([*argv, "--algo.advantage.estimator", estimator])
        strategy = get_strategy(args)
        actor_class = PolicyModelActor if variant == "upstream" else PolicyActor
        self.group = RayActorGroup(1, 1, actor_class, pg=None, num_gpus_per_actor=1)
        ray.get(self.group.async_init_model_from_pretrained(strategy, args.actor.model_name_or_path, 1000, None))
        maker = RemoteExperienceMaker if variant == "upstream" else EntropyExperienceMaker
        tokenizer = get_tokenizer(args.actor.model_name_or_path, None, "left", strategy)
        self.maker = maker(self.group, None, None, None, FixedKLController(0.0), strategy, tokenizer)
        self.timings = Timings()

    def step(self, samples: list[Experience], counted: bool) -> None:
        started = time.perf_counter()
        experiences = self.maker.make_experience_batch(samples)
        made = time.perf_counter()
        ray.get(self.group.async_run_method_batch(method_name="append", experience=experiences))
        ray.get(self.group.async_run_method(method_name="fit", kl_ctl=0.0))
        if counted:
            self.timings.experience.append(made - started)
            self.timings.train.append(time.perf_counter() - made)


def measure(argv: Sequence[str], prompt_tokens: int, response_tokens: int, repeat: int) -> dict[str, Timings]:
    """Time ``repeat`` steps of every variant, in turn on the same batches, after one step that is not counted.

    Args:
        argv: the trainer's flags that all variants share (model, batch sizes).
        prompt_tokens, response_tokens: length of prompts, and of the longest response.
    """
    args = run.parse([*argv, "--algo.advantage.estimator", "group_norm"])
    rows = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    run.start_ray(args, gpus=len(VARIANTS))
    try:
        policies = {variant: _Policy(variant, argv) for variant in VARIANTS}
        for repetition in range(repeat + 1):
            order = VARIANTS[repetition % len(VARIANTS) :] + VARIANTS[: repetition % len(VARIANTS)]
            for variant in order:
                lengths = uniform_lengths(rows, response_tokens, seed=repetition)
                samples = rollout(args, prompt_tokens, lengths, seed=repetition)
                policies[variant].step(samples, counted=repetition > 0)
        return {variant: policy.timings for variant, policy in policies.items()}
    finally:
        ray.shutdown()


def ratio(timings: dict[str, Timings], variant: str, base: str) -> tuple[float, float, float]:
    """Smallest, median and largest ratio of a step of ``variant`` to the step of ``base`` on the same batch."""
    pairs = [a / b for a, b in zip(timings[variant].step, timings[base].step, strict=True)]
    return min(pairs), statistics.median(pairs), max(pairs)
