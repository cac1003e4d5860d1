"""Seconds of one optimizer step and of forward passes on Megatron: products, collectives, pipeline bubble, optimizer.

Nothing overlaps but what the code overlaps: Megatron's gradient reduction and parameter gathering run after the backward
pass, as the actor sets them up.
"""

import math
from dataclasses import dataclass

from openrlhf_gtpo.model_shape import decoder_flops, head_flops
from openrlhf_gtpo.planner.activations import layer_bytes
from openrlhf_gtpo.planner.assumptions import Assumptions
from openrlhf_gtpo.planner.cluster import Cluster
from openrlhf_gtpo.planner.training_memory import Training
from openrlhf_gtpo.planner.workload import Workload


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch on the slowest stage: products, what is bound by memory between them, collectives."""

    products: float
    between: float
    collectives: float

    @property
    def seconds(self) -> float:
        return self.products + self.between + self.collectives


class TrainingSpeed:
    """Of ``training``'s layout on ``cluster`` at a workload; the tokens of a micro-batch are averages.

    Attributes:
        interleaved: parts of each pipeline stage that take turns. The actor has one; published rows have more.
    """

    interleaved = 1

    def __init__(self, training: Training, cluster: Cluster, workload: Workload, assumptions: Assumptions) -> None:
        self.training = training
        self.cluster = cluster
        self.workload = workload
        self.assumptions = assumptions
        self.micro_batches, self._tokens = workload.micro_batches(training.data_parallel)
        self._lengths = [int(workload.prompt + length) for length in workload.responses]

    @property
    def stragglers(self) -> float:
        """How much longer the replica with the most tokens takes than the mean one: rows differ in length."""
        replicas, rows = self.training.data_parallel, self.workload.batch / self.training.data_parallel
        mean = sum(self._lengths) / len(self._lengths)
        deviation = math.sqrt(sum((length - mean) ** 2 for length in self._lengths) / len(self._lengths))
        return 1 + deviation / mean * math.sqrt(2 * math.log(replicas) / rows) if replicas > 1 else 1.0

    def optimizer_step(self) -> dict[str, float]:
        """``passes`` (forward and backward through the pipeline), ``reduction`` and ``update``."""
        forward, backward = self._forward(), self._backward()
        slots = self.micro_batches + (self.training.layout.pipeline_model_parallel_size - 1) / self.interleaved
        return {
            "passes": slots * (forward.seconds + backward.seconds) * self.stragglers,
            "reduction": self._reduction(),
            "update": self._update(),
        }

    def scoring(self) -> float:
        """A forward pass over all rows of the rollout."""
        slots = self.micro_batches * self.workload.optimizer_steps
        slots += self.training.layout.pipeline_model_parallel_size - 1
        return slots * self._forward().seconds * self.stragglers

    def flops(self) -> float:
        """Of the model, in one optimizer step's forward and backward passes over all replicas; recompute adds none."""
        return 3 * self.workload.batch * sum(self._row_flops())

    def _row_flops(self) -> tuple[float, float]:
        """Of one row on average, in a forward pass: decoder and head."""
        shape = self.training.shape
        decoder = decoder_flops(shape, self._lengths) / len(self._lengths)
        return decoder, head_flops(shape, 1) * self.workload.response

    def _forward(self) -> Pass:
        """On the last stage, which has the head too."""
        training, layout = self.training, self.training.layout
        rows = self._tokens / (self.workload.prompt + self.workload.response)
        shares = layout.tensor_model_parallel_size * layout.context_parallel_size
        decoder, head = (flops * rows / shares for flops in self._row_flops())
        decoder /= layout.pipeline_model_parallel_size
        scores = decoder * self._attention_share()
        layers = training.shape.num_layers / layout.pipeline_model_parallel_size
        kept = (
            layers
            * layer_bytes(training.shape, training.setting, "none")
            * self._tokens
            / layout.context_parallel_size
        )
        return Pass(
            products=(decoder - scores) / self._rate() + (scores + head) / self._rate(in_fp8=False),
            between=2 * kept / self._memory_bandwidth(),  # written, and read by what comes next
            collectives=self._collectives(),
        )

    def _backward(self) -> Pass:
        """Twice the products; what was kept is read, and a gradient of its size written and read."""
        forward = self._forward()
        again = {"none": 0.0, "selective": self._attention_share(), "full": 1.0}[self.training.recompute]
        return Pass(
            products=(2 + again) * forward.products,
            between=(2 + again) * forward.between,
            collectives=(2 if self.training.recompute == "full" else 1) * forward.collectives,
        )

    def _attention_share(self) -> float:
        """Of a forward pass's operations, those of attention's scores."""
        shape = self.training.shape
        pairs = sum(length * (length + 1) // 2 for length in self._lengths)
        return shape.num_layers * 4 * pairs * shape.query_width / decoder_flops(shape, self._lengths)

    def _rate(self, in_fp8: bool = True) -> float:
        """FLOP/s of one GPU."""
        gpu, assumed = self.cluster.gpu, self.assumptions
        if self.training.shape.num_experts:
            return gpu.bf16 * assumed.compute_experts
        if self.training.fp8 is not None and in_fp8:
            assert gpu.fp8 is not None
            return gpu.fp8 * assumed.compute_fp8
        return gpu.bf16 * assumed.compute_bf16

    def _collectives(self) -> float:
        """Of one micro-batch on a stage: TP's two all-reduces (or gather and scatter) a layer, CP's keys and values, EP's
        exchanges, and the activations sent to the next stage."""
        shape, layout = self.training.shape, self.training.layout
        tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
        tokens = self._tokens / context
        layers = shape.num_layers / layout.pipeline_model_parallel_size
        hidden = 2 * shape.hidden_size * tokens
        seconds = layers * 4 * (tensor - 1) / tensor * hidden / self._bandwidth(tensor)
        if context > 1:
            keys = 2 * 2 * shape.key_value_width / tensor * tokens * (context - 1)
            seconds += layers * keys / self._bandwidth(tensor * layout.pipeline_model_parallel_size * context)
        if layout.expert_model_parallel_size > 1:
            expert = layout.expert_model_parallel_size
            sent = 2 * hidden * shape.experts_per_token * (expert - 1) / expert / (tensor if tensor > 1 else 1)
            seconds += layers * sent / self._bandwidth(layout.model_parallel_size * expert)
        if layout.pipeline_model_parallel_size > 1:
            spread = self.training.setting.spread
            seconds += hidden * spread / self._bandwidth(tensor * layout.pipeline_model_parallel_size)
        return seconds

    def _bandwidth(self, consecutive: int) -> float:
        inside = consecutive <= self.cluster.gpus_per_node
        return self.cluster.link(consecutive) * (self.assumptions.link if inside else self.assumptions.network)

    def _parameters(self) -> float:
        """On the rank with the most."""
        stages = self.training.layout.pipeline_model_parallel_size
        return max(sum(self.training.stage_parameters(stage).values()) for stage in {0, stages - 1})

    def _reduction(self) -> float:
        """Gradients in float32 to their owners, and weights back in bfloat16 (or as much in one all-reduce)."""
        replicas = self.training.data_parallel * self.training.layout.context_parallel_size
        moved = (6 if self.training.distributed_optimizer else 8) * self._parameters() * (replicas - 1) / replicas
        return moved / self._bandwidth(self.training.layout.model_parallel_size * self.training.data_parallel)

    def _update(self) -> float:
        """AdamW reads gradient, weight and two moments in float32, writes three of them and the bfloat16 weight."""
        replicas = self.training.data_parallel * self.training.layout.context_parallel_size
        shard = self._parameters() / (replicas if self.training.distributed_optimizer else 1)
        return 30 * shard / self._memory_bandwidth()

    def _memory_bandwidth(self) -> float:
        return self.cluster.gpu.memory_bandwidth * self.assumptions.memory_bandwidth
