"""Memory of one rank of the Megatron actor over a train step: constant memory, and the peak on top of it.

The peak is the maximum over a few moments, each derived from the code: ``megatron/model/policy.py``,
``megatron/model/layers.py``, ``lm_head/``, Megatron's DDP and optimizer. :mod:`candidate` adds the CUDA context, NCCL
and the allocator's fragmentation.

Two kinds of layers keep different tensors for the backward pass:

- ``local``: the layers of ``megatron/model/layers.py``, used where Transformer Engine is missing. What autograd keeps
  was listed operation by operation, and a test checks it against measurements.
- ``te``: Transformer Engine's fused modules on a CUDA device. Listed from their sources (2.9 to 2.11), within 2 % of
  the peak on an H200 (docs/results/planner.md).

Activations are bfloat16, 2 bytes, unless a line says otherwise.
"""

from dataclasses import dataclass, replace

from openrlhf_gtpo.lm_head import tiles
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.model_shape import ModelShape

# On a CPU, attention over shorter sequences is in float32; ``megatron.model.layers`` explains why.
SHORT_ROW = 384


@dataclass(frozen=True)
class Training:
    """The settings and sizes of a train step on one rank.

    Fields:
        data_parallel: replicas of the model.
        tokens: tokens of one replica's micro-batch.
        response_tokens: how many of these tokens are actions.
        micro_batches: micro-batches of a replica in an optimizer step.
        recompute: one of ``megatron.parallel.layout.RECOMPUTE``.
        distributed_optimizer: shard optimizer states over the replicas.
        fp8: matrix products in FP8, which keep their inputs in one byte; None for bfloat16.
        local: layers are ``local``, which here implies a host without CUDA; else ``te``.
        short_rows: sequences have fewer than :data:`SHORT_ROW` tokens; matters only for ``local`` layers.
        lm_head_bytes: working memory of the LM head; None for its own choice.
        lora_rank: train adapters of this rank instead of the weights; 0 for none.
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
    local: bool = False
    short_rows: bool = False
    lm_head_bytes: int | None = None
    lora_rank: int = 0

    @property
    def tensor(self) -> int:
        return self.layout.tensor_model_parallel_size

    @property
    def pipeline(self) -> int:
        return self.layout.pipeline_model_parallel_size

    @property
    def sequence_parallel(self) -> bool:
        return self.layout.sequence_parallel and self.tensor > 1

    @property
    def spread(self) -> float:
        """A rank's share of activations outside attention and MLP: 1/TP under sequence parallelism."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    @property
    def input_bytes(self) -> float:
        """Bytes per kept element of a matrix product's input, including a float32 scale per 128 elements if scales are
        blockwise."""
        if self.fp8 is None or self.fp8.emulated:
            return 2.0
        return 1 + 4 / 128 if self.fp8.recipe == "blockwise" else 1.0

    @property
    def rank_tokens(self) -> float:
        """Tokens of a micro-batch on one rank. Tensor-parallel ranks split them only under sequence parallelism."""
        return self.tokens / self.layout.context_parallel_size

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: DP × CP."""
        return self.data_parallel * self.layout.context_parallel_size

    @property
    def ends(self) -> tuple[int, ...]:
        """The first and last stage: one of them has the maximum of any part."""
        return (0, self.pipeline - 1) if self.pipeline > 1 else (0,)

    def stage_parameters(self, stage: int) -> dict[str, int]:
        return self.shape.stage_parameters(
            stage, tensor=self.tensor, pipeline=self.pipeline, expert=self.layout.expert_model_parallel_size
        )

    def adapter_parameters(self) -> int:
        """Parameters of a stage's adapters on one rank."""
        return self.shape.num_layers // self.pipeline * self.shape.adapter_parameters(self.lora_rank, self.tensor)

    def trained_parameters(self, stage: int) -> int:
        """Parameters on one rank of ``stage`` that have gradients."""
        return self.adapter_parameters() if self.lora_rank else sum(self.stage_parameters(stage).values())

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once (1F1B)."""
        return min(self.pipeline - stage, self.micro_batches)


def layer_bytes(training: Training) -> float:
    """Bytes that a decoder layer keeps for the backward pass, per token of a micro-batch on one rank. Recompute
    ``full`` keeps only the layer's input, ``selective`` the MLP's input, before the norm if it is dense."""
    hidden = 2 * training.shape.hidden_size * training.spread
    if training.recompute == "full":
        return hidden
    norm, attention = _norm(training), _attention(training) + _adapters(training, 4)
    if training.recompute == "selective":
        return norm + attention + (norm if training.shape.num_experts else hidden)
    return 2 * norm + attention + _mlp(training) + _adapters(training, 0 if training.shape.num_experts else 3)


def _adapters(training: Training, products: int) -> float:
    """Bytes per token that the adapters of attention or a dense MLP keep, for a number of Hugging Face ``products``:
    A's output, and the input, which is normalized again for them."""
    if not training.lora_rank or not products:
        return 0.0
    return 2 * training.lora_rank * products + (2 * training.shape.hidden_size + 4) * training.spread


def _norm(training: Training) -> float:
    """Bytes per token of one of a layer's two norms, including the input of the matrix product that follows."""
    hidden, reciprocal = float(training.shape.hidden_size), 4.0
    if training.local:  # the input in float32, then normalized in bfloat16, then scaled for the product
        each = 4 * hidden + 2 * hidden + 2 * hidden
    else:  # the input, and the normalized input
        each = 2 * hidden + training.input_bytes * hidden
    return (each + reciprocal) * training.spread


def _attention(training: Training) -> float:
    """Bytes per token between attention's two projections, including the input of the second."""
    shape = training.shape
    query, key = shape.query_width, shape.key_value_width
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    # Rotated query and key, and the first projection's result with the value.
    inputs = 2 * (query + 2 * key) + 2 * query + 2 * key
    logsumexp = 4 * heads
    result = 2 * query  # also serves as the second projection's input, except in FP8
    if training.local:
        if training.short_rows:  # copies in float32 replace the inputs
            kept: float = 4 * (query + 2 * key) + 4 * query + logsumexp + result
        else:
            kept = inputs + 2 * query + logsumexp + result
        normed = 6 * (query + key) + 4 * (heads + groups)
        angles = 8.0 * shape.head_dim  # cosines and sines for query and key, on every rank
    else:
        quantized = 0.0 if training.fp8 is None or training.fp8.emulated else training.input_bytes * query
        kept = inputs + result + quantized + logsumexp
        normed = 2 * query + 2 * key
        angles = 0.0
    return (kept + (normed if shape.qk_norm else 0)) / training.tensor + angles


def _mlp(training: Training) -> float:
    """Bytes per token between the MLP's two matrix products, including the second's input: 4I and 2I, and the local
    layers' two factors."""
    shape = training.shape
    kept = (10 if training.local else 4 + training.input_bytes) * (shape.intermediate_size / training.tensor)
    if not shape.num_experts:
        return kept
    # A token's copies on the way to the experts and back, and the router's scores in float32.
    return shape.experts_per_token * (kept + 4 * shape.hidden_size) + 8 * shape.num_experts


def fp8_parameters(training: Training, stage: int) -> float:
    """A rank's parameters on ``stage`` that are in FP8 matrix products."""
    parts, fp8 = training.stage_parameters(stage), training.fp8
    if fp8 is None:
        return 0.0
    covered = 1 - (fp8.layers_at_start_in_bf16 + fp8.layers_at_end_in_bf16) / training.shape.num_layers
    return (parts["attention"] + parts.get("mlp", 0)) * covered


def held_bytes(training: Training, stage: int) -> dict[str, float]:
    """Bytes held throughout training: ``weights`` (bfloat16 or FP8 primary), ``gradients`` (float32), ``optimizer``
    (float32 weights and AdamW's two moments) and ``fp8_caches``."""
    parts, fp8 = training.stage_parameters(stage), training.fp8
    held = sum(parts.values()) + (training.adapter_parameters() if training.lora_rank else 0)
    trained = training.trained_parameters(stage)
    experts = 0 if training.lora_rank else parts.get("experts", 0)
    dense = trained - experts
    shard: float = trained
    if training.distributed_optimizer:
        replicas = training.replicas
        shard = dense / replicas + experts * training.layout.expert_model_parallel_size / replicas
    in_fp8 = fp8_parameters(training, stage)
    # Transformer Engine keeps a weight row-wise and column-wise, a byte each: Hopper multiplies in only one
    # orientation.
    fp8_bytes = in_fp8 * (1 if fp8 is None or fp8.emulated else 2 * training.input_bytes)
    primary = fp8 is not None and fp8.primary_weights
    return {
        "weights": 2.0 * (held - in_fp8) + fp8_bytes if primary else 2.0 * held,
        "gradients": 4.0 * trained,
        "optimizer": 12.0 * shard,
        "fp8_caches": 0.0 if primary or fp8 is None or fp8.emulated else fp8_bytes,
    }


def activation_bytes(training: Training, stage: int) -> float:
    """Peak bytes kept for the backward pass by all micro-batches in flight."""
    hidden, tokens = training.shape.hidden_size, training.rank_tokens
    stage_layers = training.shape.num_layers // training.pipeline * layer_bytes(training)
    # A stage's input and its sent output stay until their backward pass.
    ends = (stage > 0) + (stage < training.pipeline - 1)
    kept = training.in_flight(stage) * (stage_layers + ends * 2 * hidden * training.spread) * tokens
    if training.sequence_parallel and not training.lora_rank:
        # Megatron's buffer of gathered inputs is never freed. Frozen products do not use it.
        kept += 2 * hidden * tokens
    return kept


def temporary_bytes(training: Training, stage: int) -> dict[str, float]:
    """Peak bytes on top of :func:`held_bytes` and :func:`activation_bytes`, by moment in the step.

    A moment may be negative if some activations are already freed.
    """
    shape, tokens, share, local = training.shape, training.rank_tokens, training.spread, training.local
    hidden = shape.hidden_size
    inside = shape.intermediate_size / training.tensor * max(1, shape.experts_per_token)
    last = stage == training.pipeline - 1
    # A matrix's gradient in bfloat16, and on a CPU its widened copy during the addition to the float32 buffer. A
    # matrix with an adapter has none.
    gradient = 0 if training.lora_rank else 6 if local else 2
    matrix = hidden * shape.intermediate_size / training.tensor
    again = 0.0  # one layer's recomputed activations, besides its input
    if training.recompute != "none":
        kept_anyway = layer_bytes(training) if training.recompute == "selective" else 0
        again = (layer_bytes(replace(training, recompute="none")) - kept_anyway + 2 * hidden * share) * tokens
    gathered = 2 * hidden * tokens if training.sequence_parallel else 0.0
    embedding = 2 * shape.embedding_parameters(training.tensor)
    # A tied head's gradient waits for the embedding's.
    waiting = embedding if shape.tied and stage == 0 and last and not training.lora_rank else 0
    again += waiting
    moments = {
        # The gradients of the gate's two factors and of their product; the product itself is already freed.
        "mlp": again + 4 * inside * tokens + 4 * hidden * share * tokens + gathered,
        "mlp_weight": again + 2 * inside * tokens + 2 * hidden * share * tokens + gathered + gradient * matrix,
    }
    if last:
        norm = (24 if local else 6) * hidden * share * tokens  # the norm's input and its gradient
        kept = (6 if local else 4) * hidden * share * tokens
        moments |= {"final_norm": norm + waiting, "head": kept + head_bytes(training)}
    if stage == 0:
        freed = activation_bytes(training, stage) / max(1, training.in_flight(stage))
        moments["embedding"] = waiting + gradient / 2 * embedding - freed
    return moments | (_host_moments(training, stage) if local else {})


def _host_moments(training: Training, stage: int) -> dict[str, float]:
    """Memory at the moments after the backward pass on a host without CUDA. On GPUs, NCCL and fused kernels need
    almost none."""
    shape, freed = training.shape, activation_bytes(training, stage)
    largest: float = 2 * shape.hidden_size * shape.intermediate_size / training.tensor
    if stage in training.ends:
        largest = max(largest, shape.embedding_parameters(training.tensor))
    if training.lora_rank:
        largest = training.lora_rank * (shape.hidden_size + shape.intermediate_size)
    if not training.distributed_optimizer:
        return {"adam": 8 * largest - freed}
    return {
        "adam": 8 * largest / training.data_parallel - freed,  # two float32 intermediate results per parameter
        "reduction": held_bytes(training, stage)["gradients"] - freed,  # gloo's copy of the gradient buffer
    }


def head_bytes(training: Training) -> float:
    """Bytes of the LM head's backward pass: actions' hidden states, their gradient, and tiles within the budget."""
    shape = training.shape
    tokens = max(1, int(training.response_tokens / training.layout.context_parallel_size))
    columns = shape.padded_vocab_size(training.tensor) // training.tensor
    budget = training.lm_head_bytes or tiles.default_budget(training.local)
    working = tiles.backward_peak(
        tokens, columns, shape.hidden_size, budget=budget, on_cpu=training.local, is_frozen=training.lora_rank > 0
    )
    weight = 0 if training.lora_rank else 2 * columns * shape.hidden_size  # bytes of its gradient
    hidden = 2 * shape.hidden_size * tokens
    if not shape.tied:
        # The weight's gradient is added straight to the float32 buffer, and a dummy replaces it after the tiles.
        return 2 * hidden + max(weight, working)
    widened = 2 * weight if training.local and training.pipeline > 1 else 0
    return 2 * hidden + weight + max(working, widened)


def step_bytes(training: Training, stage: int) -> dict[str, float]:
    """Bytes by part. Their sum is the peak of a train step on a rank of ``stage``."""
    moments = temporary_bytes(training, stage)
    most = max(0.0, *moments.values())
    head = min(moments.get("head", 0.0), most)
    activations = activation_bytes(training, stage)
    return held_bytes(training, stage) | {"activations": activations, "head": head, "temporary": most - head}


def forward_bytes(training: Training, stage: int) -> float:
    """Bytes of a forward pass without gradients, besides the weights: one layer's intermediates, the head's tiles."""
    layer = layer_bytes(replace(training, fp8=None, recompute="none")) * training.rank_tokens
    head = training.lm_head_bytes or tiles.default_budget(training.local)
    return layer + (head if stage == training.pipeline - 1 else 0)
