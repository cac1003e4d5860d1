"""One candidate (layout, precision, recompute, placement of the engines): its memory and its step time by phase."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from openrlhf_gtpo.megatron.fp8.options import RECIPES
from openrlhf_gtpo.megatron.parallel.layout import RECOMPUTE
from openrlhf_gtpo.tools.planner.cluster import Cluster
from openrlhf_gtpo.tools.planner.rollout import Engines
from openrlhf_gtpo.tools.planner.training_memory import (
    Training,
    activation_bytes,
    forward_bytes,
    fp8_parameters,
    held_bytes,
    step_bytes,
)
from openrlhf_gtpo.tools.planner.training_speed import TrainingSpeed

SYNC_BUCKET = 256 * 2**20  # --vllm.sync_bucket_mb
PLACEMENTS = ("colocated", "split")


@dataclass(frozen=True)
class Candidate:
    """A candidate: layout, placement and precision.

    Fields:
        training: the actor's layout, precision and recompute.
        cluster: the GPUs that train.
        engines: the rollout's engines, on the same GPUs (colocated) or others (split), with workload and assumptions.
        offload: the idle one of trainer and engines keeps its memory on the host; only if colocated.
        async_enable: the next rollout is sampled during training (``--train.async_enable``); only if split.
    """

    training: Training
    cluster: Cluster
    engines: Engines
    colocated: bool = True
    offload: bool = True
    async_enable: bool = False

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.cluster.gpus if self.colocated else self.cluster.gpus + self.engines.gpus

    @cached_property
    def speed(self) -> TrainingSpeed:
        return TrainingSpeed(self.training, self.cluster, self.engines.workload, self.engines.assumptions)

    @cached_property
    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes by phase and part, on the GPU that uses the most. ``kv_cache`` is what vLLM allocates, if it fits."""
        phases: dict[str, dict[str, float]] = {}
        for stage in self.training.ends:
            for phase, parts in self._stage_memory(stage).items():
                if phase not in phases or sum(parts.values()) > sum(phases[phase].values()):
                    phases[phase] = parts
        return phases

    def _stage_memory(self, stage: int) -> dict[str, dict[str, float]]:
        training, assumed, offloaded = self.training, self.engines.assumptions, self.offload and self.colocated
        held, engine = held_bytes(training, stage), self.engines.memory()
        context = {"context": assumed.context_bytes}
        asleep = context | ({"vllm_asleep": assumed.asleep_bytes} if self.colocated else {})
        weights, caches = {"weights": held["weights"]}, {"fp8_caches": held["fp8_caches"]}
        # A reference on the device keeps only the rows of its FP8 weights' two copies.
        reference_bytes = held["weights"] + (0.0 if offloaded else held["fp8_caches"] / 2)
        reference = {"reference": reference_bytes} if self._has_reference else {}
        states = {} if offloaded else {name: held[name] for name in ("gradients", "optimizer")} | caches
        resting = {} if offloaded else reference
        loaded = {name: engine[name] for name in ("vllm_weights", "vllm_working")}
        # One bucket is filled while the other is sent. The embedding, or the head, gets a bucket of its own if it is
        # larger, plus memory to gather and merge its parts.
        largest, parts = 2.0 * training.shape.vocab_size * training.shape.hidden_size, 2 + 1 / training.tensor
        buckets = SYNC_BUCKET + max(SYNC_BUCKET, largest) + (largest * parts if training.tensor > 1 else 0.0)
        bucket = {"sync_bucket": buckets}
        beside_engine = weights | states | reference if self.colocated and not offloaded else {}
        beside_trainer = context | resting | (loaded if self.colocated else {})  # the sleeping engine has no cache
        work = self.engines.workload
        tokens = min(work.micro_batch_tokens(training.layout.context_parallel_size), work.rows * work.row_length)
        activations = {"activations": forward_bytes(replace(training, tokens=tokens), stage)}  # of any rows
        read = {"optimizer": held["optimizer"]}  # read from a checkpoint, or written to one
        if training.fp8 is not None and training.fp8.primary_weights:  # checkpoints store these weights in bfloat16
            read["bf16_copies"] = 2 * fp8_parameters(training, stage)
        fresh_states = {"gradients": held["gradients"], "optimizer": held["optimizer"] / 3}  # only the float32 weights
        # Loading a checkpoint brings the moments after the gradients have left.
        starting = max(fresh_states, read, key=lambda parts: sum(parts.values())) if offloaded else states | read
        return {
            "start": asleep | weights | starting | reference,
            "forward": asleep | weights | states | caches | reference | activations,
            "train": asleep | resting | step_bytes(training, stage),
            "sync": beside_trainer | weights | states | bucket,
            "save": beside_trainer | weights | states | read,
            "rollout": context | loaded | {"kv_cache": max(0.0, engine["kv_cache"])} | beside_engine,
        }

    @property
    def _has_reference(self) -> bool:
        """True if KL needs a model of its own. With LoRA, the reference is the actor without adapters."""
        return self.engines.workload.kl and not self.training.lora_rank

    @property
    def limit(self) -> float:
        """Usable bytes of a GPU's memory."""
        return self.cluster.gpu.memory * self.engines.assumptions.usable

    @cached_property
    def breaks(self) -> tuple[str, float]:
        """The phase closest to the limit, and its bytes over the limit (negative: to spare)."""
        over = {phase: sum(parts.values()) - self.limit for phase, parts in self.memory.items()}
        engines = self.engines
        cache = engines.memory()["kv_cache"] - engines.workload.row_length * engines.token_bytes
        if cache < 0:
            over["kv_cache"] = -cache
        return max(over.items(), key=lambda phase: phase[1])

    @property
    def fits(self) -> bool:
        return self.breaks[1] <= 0 and self.engines.fits

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a whole step, by phase."""
        work = self.engines.workload
        return {
            "rollout": self.engines.seconds,
            "forward": self.speed.scoring() * work.scorings,
            "train": work.optimizer_steps * sum(self.speed.optimizer_step().values()),
            "sync": self._sync(),
            "between": self.engines.assumptions.phase * 3 + 2 * self.host_bytes / self.engines.assumptions.host_copy,
        }

    @property
    def step_seconds(self) -> float:
        seconds = self.seconds
        rollout, training = seconds["rollout"], seconds["forward"] + seconds["train"]
        both = max(rollout, training) if self.async_enable else rollout + training
        return both + seconds["sync"] + seconds["between"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses, without padding, per second and GPU."""
        return self.engines.workload.tokens / self.step_seconds / self.gpus

    @property
    def mfu(self) -> float:
        """MFU of the train phase: the model's operations over the BF16 peak (FP8's where FP8 is used)."""
        gpu = self.cluster.gpu
        peak = gpu.fp8 if self.training.fp8 is not None else gpu.bf16
        assert peak is not None
        seconds = sum(self.speed.optimizer_step().values())
        return self.speed.flops() / seconds / self.cluster.gpus / peak

    def _sync(self) -> float:
        """Seconds to send all weights in bfloat16 to each engine: gather over TP inside a node, send over PP and to
        other GPUs."""
        total = 2.0 * self.training.shape.parameters
        assumed, cluster, stages = self.engines.assumptions, self.cluster, self.training.pipeline
        link, network = cluster.gpu.link * assumed.link, cluster.network * assumed.network
        seconds = total / link + total / (cluster.gpu.memory_bandwidth * assumed.memory_bandwidth)
        if stages > 1:
            across = self.training.layout.model_parallel_size > cluster.gpus_per_node
            seconds += total * (stages - 1) / stages / (network if across else link)
        if not self.colocated:
            seconds += total / (network if cluster.nodes > 1 or self.engines.cluster.nodes > 1 else link)
        return seconds

    @property
    def host_bytes(self) -> float:
        """Host memory per GPU that offloading occupies, and moves back and forth in a step, in bytes: the trainer's
        weights and optimizer, the weights of the reference and of the engines."""
        if not (self.colocated and self.offload):
            return 0.0
        held = held_bytes(self.training, 0)
        models = 2 if self._has_reference else 1
        return models * held["weights"] + held["optimizer"] + self.engines.memory()["vllm_weights"]

    @property
    def preference(self) -> tuple:
        """Sort key for candidates that fit: time, then (if within 2 %) the candidate that changes or splits less."""
        layout, fp8 = self.training.layout, self.training.fp8
        return (
            round(math.log(self.step_seconds) / math.log(1.02)),
            0 if fp8 is None else 1 + RECIPES[::-1].index(fp8.recipe),
            layout.context_parallel_size,
            layout.pipeline_model_parallel_size,
            RECOMPUTE.index(self.training.recompute),
            self.step_seconds,
        )

    def activations(self) -> dict[str, float]:
        """Bytes of activations on the first stage with each kind of recompute."""
        return {kind: activation_bytes(replace(self.training, recompute=kind), 0) for kind in RECOMPUTE}
