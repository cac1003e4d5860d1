"""Seconds of an optimizer step and of forward passes on Megatron: products, collectives, pipeline bubble, optimizer.

Overlaps are modeled as in the code: gradients are reduced during the last micro-batch's backward pass, and weights are
gathered during the next optimizer step's first forward pass.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, pstdev

from openrlhf_gtpo.model_shape import decoder_flops, head_flops
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.cluster import Cluster
from openrlhf_gtpo.tools.planner.training_memory import Training, held_bytes, layer_bytes
from openrlhf_gtpo.tools.planner.workload import Workload


@dataclass(frozen=True)
class TrainingSpeed:
    """The speed of a layout on a cluster for a workload, with micro-batches of the mean number of tokens.

    Fields:
        interleaved: interleaved chunks per pipeline stage. The actor has one; published results have more.
    """

    training: Training
    cluster: Cluster
    workload: Workload
    assumptions: Assumptions
    interleaved: int = 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in an optimizer step."""
        return self._micro_batches[0]

    @property
    def _tokens(self) -> float:
        """Mean tokens of a micro-batch."""
        return self._micro_batches[1]

    @cached_property
    def _micro_batches(self) -> tuple[int, float]:
        return self.workload.micro_batches(self.training.data_parallel, self.training.layout.context_parallel_size)

    @cached_property
    def _lengths(self) -> list[int]:
        return [int(self.workload.prompt + length) for length in self.workload.responses]

    @property
    def stragglers(self) -> float:
        """Time of the slowest replica over the mean, if rows are dealt by count."""
        replicas, rows = self.training.data_parallel, self.workload.batch / self.training.data_parallel
        variation = pstdev(self._lengths) / fmean(self._lengths)
        return 1 + variation * math.sqrt(2 * math.log(replicas) / rows)

    def optimizer_step(self) -> dict[str, float]:
        """Seconds of ``passes`` (forward and backward through the pipeline), of the exposed parts of ``reduction`` and
        ``gather``, and of ``update``."""
        training, gpu = self.training, self.cluster.gpu
        sharded, owner = training.distributed_optimizer, replace(training, distributed_optimizer=True)
        # A rank owns a shard of its parameters: a larger one of experts, because they have fewer replicas.
        parameters, owned = max(
            (training.trained_parameters(stage), held_bytes(owner, stage)["optimizer"] / 12) for stage in training.ends
        )
        # Gradients go to their owners in float32, and weights come back in bfloat16 (or gradients in one all-reduce).
        moved = parameters - owned
        bandwidth = self._bandwidth(training.layout.model_parallel_size * training.data_parallel)
        reduction, gather = (4 if sharded else 8) * moved / bandwidth, (2 if sharded else 0) * moved / bandwidth
        forward, backward = self._micro_batch()
        if self.assumptions.overlap:
            # The last gradients to be ready cannot overlap: the first bucket of 40 M parameters (Megatron's
            # bucket_size). The gather after a rollout's last optimizer step cannot overlap either.
            first, steps = min(1, 40e6 / parameters), self.workload.optimizer_steps
            gather = (gather + (steps - 1) * max(first * gather, gather - forward)) / steps
            reduction = max(first * reduction, reduction - backward)
        # AdamW reads gradient, weight and two moments in float32; writes the last three, and the bfloat16 weight.
        updated = 30 * (owned if sharded else parameters)
        slots = self.micro_batches + (training.pipeline - 1) / self.interleaved
        return {
            "passes": slots * (forward + backward),  # rows are dealt by tokens
            "reduction": reduction,
            "gather": gather,
            "update": updated / (gpu.memory_bandwidth * self.assumptions.memory_bandwidth),
        }

    def scoring(self) -> float:
        """Seconds of a forward pass over all rows of the rollout."""
        slots = self.micro_batches * self.workload.optimizer_steps + self.training.pipeline - 1
        return slots * self._micro_batch()[0] * self.stragglers

    def flops(self) -> float:
        """FLOPs of the model in one optimizer step's forward and backward passes over all replicas. Recompute does not
        count, and weights with adapters have no gradients."""
        return (2 if self.training.lora_rank else 3) * self.workload.batch * sum(self._row_flops())

    def _row_flops(self) -> tuple[float, float]:
        """Mean FLOPs of one row in a forward pass: decoder and head."""
        shape = self.training.shape
        decoder = decoder_flops(shape, self._lengths) / len(self._lengths)
        return decoder, head_flops(shape, 1) * self.workload.response

    def _micro_batch(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass on the last stage, with the head: matrix products, the
        memory-bound operations between them, and collectives."""
        training, shape = self.training, self.training.shape
        rows = self._tokens / (self.workload.prompt + self.workload.response)
        shares = training.tensor * training.layout.context_parallel_size
        decoder, head = (flops * rows / shares for flops in self._row_flops())
        decoder /= training.pipeline
        pairs = sum(length * (length + 1) // 2 for length in self._lengths)
        attention = shape.num_layers * 4 * pairs * shape.query_width / decoder_flops(shape, self._lengths)
        scores = decoder * attention
        products = (decoder - scores) / self._rate() + (scores + head) / self._rate(in_fp8=False)
        kept = shape.num_layers / training.pipeline * layer_bytes(replace(training, recompute="none")) * self._tokens
        kept /= training.layout.context_parallel_size
        between = 2 * kept / (self.cluster.gpu.memory_bandwidth * self.assumptions.memory_bandwidth)
        collectives = self._collectives()
        # The backward pass has twice the products (once where weights have no gradients) and twice the memory traffic
        # of the forward pass. Recompute adds a layer, or its MLP with one of the two collectives (for experts also
        # their exchange).
        again = products, between, collectives
        if training.recompute == "none":
            again = 0.0, 0.0, 0.0
        elif training.recompute == "selective":
            inner = 6 * shape.hidden_size * shape.intermediate_size * max(1, shape.experts_per_token)
            share = shape.num_layers * inner * sum(self._lengths) / decoder_flops(shape, self._lengths)
            dropped = 1 - layer_bytes(training) / layer_bytes(replace(training, recompute="none"))
            again = share * decoder / self._rate(), dropped * between, collectives / (1 if shape.num_experts else 2)
        backward = (1 if training.lora_rank else 2) * products + 2 * between + collectives + sum(again)
        return products + between + collectives, backward

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
        """Seconds of a micro-batch's communication on a stage: TP's two all-reduces (or gather and scatter) per layer,
        CP's keys and values, EP's exchanges, and the activations sent to the next stage."""
        training, shape = self.training, self.training.shape
        tensor, pipeline, layout = training.tensor, training.pipeline, training.layout
        context, expert = layout.context_parallel_size, layout.expert_model_parallel_size
        tokens = self._tokens / context
        layers = shape.num_layers / pipeline
        hidden = 2 * shape.hidden_size * tokens
        seconds = layers * 4 * (tensor - 1) / tensor * hidden / self._bandwidth(tensor)
        if context > 1:
            keys = 2 * 2 * shape.key_value_width / tensor * tokens * (context - 1)
            seconds += layers * keys / self._bandwidth(tensor * pipeline * context)
        if expert > 1:
            sent = 2 * hidden * shape.experts_per_token * (expert - 1) / expert / tensor
            seconds += layers * sent / self._bandwidth(tensor * pipeline * expert)
        if pipeline > 1:
            seconds += hidden * training.spread / self._bandwidth(tensor * pipeline)
        return seconds

    def _bandwidth(self, consecutive: int) -> float:
        """Bytes/s between the ranks of groups that each span ``consecutive`` adjacent GPUs."""
        cluster, assumed = self.cluster, self.assumptions
        if cluster.gpus_per_node % consecutive == 0:
            return cluster.gpu.link * assumed.link
        return cluster.network * assumed.network
