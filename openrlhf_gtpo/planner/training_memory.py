"""Memory of one rank of the Megatron actor over a train step: what it holds throughout, and the most beside that.

The peak is the largest of a few moments, each listed from the code that makes it: ``megatron/model/policy.py``,
``megatron/model/layers.py``, ``lm_head/``, Megatron's DDP and optimizer. What the CUDA context, NCCL and the allocator's
fragments take is added elsewhere (``candidate``).
"""

from dataclasses import dataclass, replace

from openrlhf_gtpo.lm_head import tiles
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.model_shape import ModelShape
from openrlhf_gtpo.planner.activations import LayerSetting, layer_bytes

CHUNK_BYTES = 256 * 2**20  # ModelOptions.chunk_bytes


@dataclass(frozen=True)
class Training:
    """A train step as one rank sees it.

    Fields:
        data_parallel: replicas of the model.
        tokens: of a micro-batch of one replica.
        response_tokens: those of them that are actions.
        micro_batches: of a replica in an optimizer step.
        recompute: ``none``, ``selective`` or ``full``.
        distributed_optimizer: states are shards over the replicas.
        kind: layers, ``te`` or ``local``; the latter stands for a host without CUDA altogether.
        short_rows: see :class:`LayerSetting`.
    """

    shape: ModelShape
    layout: Layout
    data_parallel: int
    tokens: int
    response_tokens: int
    micro_batches: int = 1
    recompute: str = "none"
    distributed_optimizer: bool = True
    fp8: Fp8Options | None = None
    kind: str = "te"
    short_rows: bool = False

    @property
    def setting(self) -> LayerSetting:
        layout = self.layout
        parallel = layout.sequence_parallel and layout.tensor_model_parallel_size > 1
        return LayerSetting(layout.tensor_model_parallel_size, parallel, self.kind, self.fp8, self.short_rows)

    @property
    def rank_tokens(self) -> float:
        """Of a micro-batch on one rank; tensor-parallel ranks share them under sequence parallelism alone."""
        return self.tokens / self.layout.context_parallel_size

    def stage_parameters(self, stage: int) -> dict[str, int]:
        layout = self.layout
        return self.shape.stage_parameters(
            stage,
            tensor=layout.tensor_model_parallel_size,
            pipeline=layout.pipeline_model_parallel_size,
            expert=layout.expert_model_parallel_size,
        )

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once (1F1B)."""
        return min(self.layout.pipeline_model_parallel_size - stage, self.micro_batches)


def held_bytes(training: Training, stage: int) -> dict[str, float]:
    """Throughout training: ``weights`` (bfloat16, or FP8 primary weights), ``gradients`` (float32), ``optimizer`` (float32
    weights and AdamW's two moments) and ``fp8_caches``."""
    parts = training.stage_parameters(stage)
    experts = parts.get("experts", 0)
    rest = sum(parts.values()) - experts
    replicas = training.data_parallel * training.layout.context_parallel_size
    if training.distributed_optimizer:
        shard = rest / replicas + experts * training.layout.expert_model_parallel_size / replicas
    else:
        shard = rest + experts
    fp8 = training.fp8
    in_fp8 = of_fp8 = 0.0
    if fp8 is not None:
        covered = 1 - (fp8.layers_at_start_in_bf16 + fp8.layers_at_end_in_bf16) / training.shape.num_layers
        in_fp8 = (parts["attention"] + parts.get("mlp", 0)) * covered
        # Transformer Engine keeps a weight's rows and columns, a byte each: Hopper multiplies in one orientation alone.
        of_fp8 = in_fp8 * (1 if fp8.emulated else 2 * training.setting.input_bytes)
    primary = fp8 is not None and fp8.primary_weights
    return {
        "weights": 2.0 * (rest + experts - in_fp8) + of_fp8 if primary else 2.0 * (rest + experts),
        "gradients": 4.0 * (rest + experts),
        "optimizer": 12.0 * shard,
        "fp8_caches": 0.0 if primary or fp8 is None or fp8.emulated else of_fp8,
    }


def activation_bytes(training: Training, stage: int, recompute: str | None = None) -> float:
    """Kept for the backward pass by all micro-batches in flight, at their most."""
    recompute = recompute or training.recompute
    pipeline, hidden = training.layout.pipeline_model_parallel_size, training.shape.hidden_size
    setting, tokens = training.setting, training.rank_tokens
    one = training.shape.num_layers // pipeline * layer_bytes(training.shape, setting, recompute)
    # A stage's input and what it has sent on stay until their backward pass.
    ends = (stage > 0) + (stage < pipeline - 1)
    kept = training.in_flight(stage) * (one + ends * 2 * hidden * setting.spread) * tokens
    if setting.sequence_parallel:
        kept += 2 * hidden * tokens  # Megatron's buffer of gathered inputs, which is never given back
    return kept


def temporary_bytes(training: Training, stage: int) -> dict[str, float]:
    """The most beside what is held and what activations keep, by moment of the step.

    A moment may be below zero, where part of the activations is gone already.
    """
    shape, setting, tokens = training.shape, training.setting, training.rank_tokens
    layout = training.layout
    hidden, share = shape.hidden_size, setting.spread
    inside = shape.intermediate_size / setting.tensor * max(1, shape.experts_per_token)
    local = setting.kind == "local"
    last = stage == layout.pipeline_model_parallel_size - 1
    # A matrix's gradient in bfloat16, on a CPU beside its widened copy while it is added to the float32 buffer.
    gradient = 6 if local else 2
    matrix = hidden * shape.intermediate_size / setting.tensor
    again = 0.0  # what full recompute brings back of one layer, beside its input
    if training.recompute == "full":
        again = (layer_bytes(shape, setting, "none") + 2 * hidden * share) * tokens
    gathered = 2 * hidden * tokens if setting.sequence_parallel else 0.0
    embedding = 2 * shape.embedding_parameters(setting.tensor)
    # The gradient of a head that is the embedding waits for the embedding's.
    waiting = embedding if shape.tied and stage == 0 and last else 0
    again += waiting
    moments = {
        # The gradients of the gate's two factors and of their product, which itself is gone.
        "mlp": again + 4 * inside * tokens + 4 * hidden * share * tokens + gathered,
        "mlp_weight": again + 2 * inside * tokens + 2 * hidden * share * tokens + gathered + gradient * matrix,
    }
    if last:
        norm = (24 if local else 6) * hidden * share * tokens  # the norm's input, and its gradient in the making
        kept = (6 if local else 4) * hidden * share * tokens
        moments |= {"final_norm": norm + waiting, "head": kept + head_bytes(training)}
    if stage == 0:
        gone = activation_bytes(training, stage) / max(1, training.in_flight(stage))
        moments["embedding"] = waiting + gradient / 2 * embedding - gone
    return moments | (_host_moments(training, stage) if local else {})


def _host_moments(training: Training, stage: int) -> dict[str, float]:
    """Those after the backward pass on a host without CUDA; elsewhere NCCL and fused kernels need next to nothing."""
    shape, tensor = training.shape, training.setting.tensor
    gone = activation_bytes(training, stage)
    matrices = [2 * shape.hidden_size * shape.intermediate_size / tensor]
    if stage in (0, training.layout.pipeline_model_parallel_size - 1):
        matrices.append(shape.embedding_parameters(tensor))
    if not training.distributed_optimizer:
        return {"adam": 8 * max(matrices) - gone}
    return {
        "adam": 8 * max(matrices) / training.data_parallel - gone,  # two float32 intermediate results of a parameter
        "reduction": held_bytes(training, stage)["gradients"] - gone,  # gloo's copy of the gradient buffer
    }


def head_bytes(training: Training) -> float:
    """The LM head's backward pass: hidden states of actions, their gradient, and the tiles within the budget."""
    shape, tensor, layout = training.shape, training.setting.tensor, training.layout
    tokens = max(1, int(training.response_tokens / layout.context_parallel_size))
    columns = shape.padded_vocab_size(tensor) // tensor
    working = tiles.backward_peak(
        tokens, columns, shape.hidden_size, budget=CHUNK_BYTES, on_cpu=training.kind == "local"
    )
    weight = 2 * columns * shape.hidden_size
    hidden = 2 * shape.hidden_size * tokens
    if not shape.tied:
        # Its gradient goes straight to the float32 buffer, and a dummy in its place comes after the tiles.
        return 2 * hidden + max(weight, working)
    widened = 2 * weight if training.kind == "local" and layout.pipeline_model_parallel_size > 1 else 0
    return 2 * hidden + weight + max(working, widened)


def step_bytes(training: Training, stage: int) -> dict[str, float]:
    """Parts whose sum is the peak of a train step on a rank of ``stage``."""
    held = held_bytes(training, stage)
    activations = activation_bytes(training, stage)
    moments = temporary_bytes(training, stage)
    head = moments.get("head", 0.0)
    most = max(0.0, *moments.values())
    return held | {"activations": activations, "head": min(head, most), "temporary": most - min(head, most)}


def peak_bytes(training: Training, stage: int) -> float:
    """Of a train step on a rank of ``stage``."""
    return sum(step_bytes(training, stage).values())


def forward_bytes(training: Training, stage: int) -> float:
    """Beside the weights, of a forward pass without gradients: one layer's intermediate results, and the head's tiles."""
    layer = layer_bytes(training.shape, replace(training.setting, fp8=None), "none") * training.rank_tokens
    last = stage == training.layout.pipeline_model_parallel_size - 1
    return layer + (CHUNK_BYTES if last else 0)
