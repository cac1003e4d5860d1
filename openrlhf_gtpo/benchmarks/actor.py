"""The DeepSpeed actor against the Megatron actor: the same ragged batches, in turn, in one run.

Both are real Ray actors of one process. Real tokens are counted, prompts included; padding never is.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import get_tokenizer

from openrlhf_gtpo.benchmarks.synthetic import long_tailed_lengths
from openrlhf_gtpo.benchmarks.synthetic_rollout import rollout
from openrlhf_gtpo.integration import run
from openrlhf_gtpo.integration.actors.megatron_actor import MegatronPolicy
from openrlhf_gtpo.integration.actors.policy_actor import EntropyPolicyActor
from openrlhf_gtpo.integration.credit.experience_maker import EntropyExperienceMaker
from openrlhf_gtpo.platform.memory import ReportsPeakMemory

BACKENDS = ("deepspeed", "megatron")


class _PeakMemory(ReportsPeakMemory):
    _most = 0

    def peak_bytes(self) -> int:
        """The most memory this process has held: of its GPU, or on a CPU host resident in all."""
        self._most = max([self._most, *self.take_peak_memory(until_now="between").values()])
        return self._most


class _DeepSpeed(_PeakMemory, EntropyPolicyActor):  # type: ignore[misc]
    pass


class _Megatron(_PeakMemory, MegatronPolicy):
    pass


@dataclass
class Measured:
    """Of one backend.

    Fields:
        forward, train: seconds of each repetition.
        tokens: real tokens of each repetition's batch.
        loaded_bytes, peak_bytes: memory of the process after loading, and at most.
    """

    forward: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    loaded_bytes: int = 0
    peak_bytes: int = 0


class _Side:
    def __init__(self, backend: str, argv: Sequence[str]) -> None:
        args = run.parse([*argv, "--actor.backend", backend])
        strategy = get_strategy(args)
        actor = ray.remote(num_gpus=1)(_Megatron if backend == "megatron" else _DeepSpeed)
        self.group = RayActorGroup(1, 1, actor, pg=None, num_gpus_per_actor=1)
        ray.get(self.group.async_init_model_from_pretrained(strategy, args.actor.model_name_or_path, 1000, None))
        tokenizer = get_tokenizer(args.actor.model_name_or_path, None, "left", strategy)
        controller = FixedKLController(0.0)
        self.maker = EntropyExperienceMaker(self.group, None, None, None, controller, strategy, tokenizer)
        self.measured = Measured(loaded_bytes=self._peak())

    def step(self, samples: list[Experience], counted: bool) -> None:
        parts = self.maker.split_rollout_samples(samples)
        columns = {name: [getattr(part, name) for part in parts] for name in _COLUMNS}
        started = time.perf_counter()
        ray.get(self.group.async_run_method_batch(method_name="forward", **columns))
        forward = time.perf_counter() - started
        experiences = self.maker.make_experience_batch(samples)  # a forward again, as training needs its results
        ray.get(self.group.async_run_method_batch(method_name="append", experience=experiences))
        started = time.perf_counter()
        ray.get(self.group.async_run_method(method_name="fit", kl_ctl=0.0))
        train = time.perf_counter() - started
        if counted:
            self.measured.forward.append(forward)
            self.measured.train.append(train)
            self.measured.tokens.append(sum(int(sample.total_length) for sample in samples))
        self.measured.peak_bytes = self._peak()

    def _peak(self) -> int:
        return int(ray.get(self.group.async_run_method(method_name="peak_bytes"))[0])


_COLUMNS = ("sequences", "action_mask", "attention_mask")


def measure(
    argv: Sequence[str],
    prompt_tokens: int,
    response_tokens: int,
    repeat: int,
    seed: int,
    backends: Sequence[str] = BACKENDS,
) -> dict[str, Measured]:
    """Time ``repeat`` batches with each backend, in alternating order, after one that is not counted.

    Args:
        argv: the trainer's flags that they share.
        prompt_tokens, response_tokens: length of prompts, and the limit of responses.
    """
    args: SimpleNamespace = run.parse([*argv, "--actor.backend", "deepspeed"])
    rows = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    run.start_ray(args, gpus=len(backends))
    try:
        sides: dict[str, Any] = {backend: _Side(backend, argv) for backend in backends}
        for repetition in range(repeat + 1):
            lengths = long_tailed_lengths(rows, response_tokens, seed + repetition)
            for backend in backends if repetition % 2 else reversed(backends):
                sides[backend].step(rollout(args, prompt_tokens, lengths, seed + repetition), repetition > 0)
        return {backend: side.measured for backend, side in sides.items()}
    finally:
        ray.shutdown()
