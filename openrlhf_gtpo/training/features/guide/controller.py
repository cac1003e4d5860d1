"""The guide's part in the controller: its engines, its sampler, and metrics of its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import vllm_engine

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.actors.actor_trainer import wait_for_engines
from openrlhf_gtpo.training.actors.dispatch import engine_bundles
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.controller.engines import kill_hanging
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.feature import ControllerFeature, EngineFeature
from openrlhf_gtpo.training.features.guide.endpoint import EndpointActor
from openrlhf_gtpo.training.features.guide.guide import Guide
from openrlhf_gtpo.training.features.guide.sampler import GuidedSampler
from openrlhf_gtpo.training.rollout.answers import Answer
from openrlhf_gtpo.training.rollout.rewards import Patience
from openrlhf_gtpo.training.rollout.rollout_actor import MAX_CALLS, StrictRolloutActor
from openrlhf_gtpo.training.rows import Row

_RESCUE = "rescue_rows"  # in a checkpoint; an earlier version wrote "rescue", with responses


class GuideInController(ControllerFeature):
    """The guide of a run. A replay has none, but its dumps may have a guide's rows."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args)
        self.guide: Guide | None = None
        self._sampler: GuidedSampler | None = None
        self._metrics: dict[str, float] = {}

    def sampler(self, run: Any) -> GuidedSampler | None:
        if not self.args.algo.guide.model_name_or_path:
            return None
        shared = run.models.actor.placement_group if self.args.train.colocate_all else None
        self.guide = Guide(start_guide(self.args, shared), self.args)
        self._sampler = GuidedSampler(*run.sampling, guide=self.guide)
        return self._sampler

    def begin(self, run: Any) -> None:
        if self.guide is not None:
            wait_for_engines(self.guide.engines, "guide engine")
            kill_hanging(self.guide.engines, self.args.train.stall_timeout, self.guide.hangs)

    def on_batch(self, batch: RolloutBatch, experiences: Sequence[Experience]) -> None:
        self._metrics = {}
        if not any(names.GUIDE_ROWS in experience.info for experience in experiences):
            return
        for name, rows in ((names.GUIDE_REWARD, batch.off_policy), (names.GUIDE_POLICY_REWARD, ~batch.off_policy)):
            if rows.any():
                self._metrics[name] = batch.outcome[rows].float().mean().item()

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        metrics |= self._metrics
        if self.guide is None or self._sampler is None:
            return
        self.guide.step = step
        if self.args.algo.guide.rescue_batch:
            queue = self._sampler.queue
            metrics[names.RESCUE_QUEUED] = float(len(queue))
            metrics |= {names.RESCUE_RESCUED: float(queue.rescued), names.RESCUE_GIVEN_UP: float(queue.given_up)}

    def state(self) -> dict[str, Any]:
        return {} if self._sampler is None else {_RESCUE: self._sampler.queue.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        if self.guide is not None and self._sampler is not None:
            self.guide.step = step
            if "rescue" in state:
                print(
                    "Warning: ignored the checkpoint's queue of rescues, which an earlier version wrote.", flush=True
                )
            if _RESCUE in state:
                self._sampler.queue.restore(state[_RESCUE])


class OffPolicy(EngineFeature):
    """A feature of an engine that is not the policy's: marks its rows as off-policy."""

    def on_row(self, row: Row, response: dict[str, Any], answers: Sequence[Answer] | None) -> None:
        row.off_policy = True


def start_guide(args: Arguments, shared: Any) -> list[Any]:
    """Start rollout actors that load ``--algo.guide.model_name_or_path``, or one that asks ``--algo.guide.endpoint``.
    They may still be loading when this returns.

    Args:
        args: the run's arguments.
        shared: placement group of the trainer's GPUs, for the actors too; None to give them their own GPUs.
    """
    guide, vllm = args.algo.guide, args.vllm
    with_rewards = {"agent_func_path": args.train.agent_func_path, "remote_rm_url": args.reward.remote_url}
    fields: dict[str, Any] = {"patience": Patience.of(args), "features": (OffPolicy(),), "gets_weights": False}
    if guide.endpoint:
        actor = ray.remote(max_concurrency=MAX_CALLS)(type("GuideActor", (EndpointActor,), fields))
        return [actor.options(num_cpus=0).remote(guide.endpoint, guide.model_name_or_path, **with_rewards)]
    fields["engine_args"] = {name: getattr(vllm, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    # Nobody else makes engines in the controller's process.
    vllm_engine.get_bundle_indices = engine_bundles
    guide_actor = type("GuideActor", (StrictRolloutActor,), fields)
    vllm_engine.RolloutRayActor = ray.remote(max_concurrency=MAX_CALLS)(guide_actor)
    return vllm_engine.create_vllm_engines(
        guide.num_engines,
        guide.tensor_parallel_size,
        guide.model_name_or_path,
        args.train.seed + vllm.num_engines,
        args.train.full_determinism_enable,
        vllm.enable_prefix_caching,
        vllm.enforce_eager,
        args.data.max_len,
        shared,
        guide.gpu_memory_utilization,
        vllm.enable_sleep,
        "processed_logprobs",
        **with_rewards,
    )
