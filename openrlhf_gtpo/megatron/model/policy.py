"""A causal language model on Megatron-core whose last stage gives log-probs and entropies, never logits."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from torch import Tensor

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.lora.folder import description
from openrlhf_gtpo.megatron.fp8 import weights as fp8_weights
from openrlhf_gtpo.megatron.fp8.fp8 import Fp8
from openrlhf_gtpo.megatron.fp8.options import Fp8Options, check_fp8_host, check_transformer_engine
from openrlhf_gtpo.megatron.model.adapters import adapters_of, add_adapters
from openrlhf_gtpo.megatron.model.config import layer_spec, megatron_config, read_config, rotary_arguments
from openrlhf_gtpo.megatron.model.conversion import EXPERTS, Stored, load_weights, stored_parameters
from openrlhf_gtpo.megatron.model.packing import Packed, TreeParams
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.context import gather_actions
from openrlhf_gtpo.megatron.parallel.host import device, has_transformer_engine, megatron_calls, on_cuda
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.model_shape import ModelShape
from openrlhf_gtpo.platform.agreement import from_first_rank
from openrlhf_gtpo.platform.files import model_folder


@dataclass(frozen=True)
class ModelOptions:
    """How a checkpoint becomes a model.

    Fields:
        layout: the parallel sizes.
        dtype: of parameters and activations, bfloat16 or float32.
        temperature: of the policy: log-probs and entropies are computed from softmax(logits / temperature).
        recompute: what the backward pass computes again: nothing, the MLP or the mixture of experts (selective), or
            whole layers (full).
        overrides: TransformerConfig fields that override all others.
        fp8: which products are in FP8, and how; None for none.
        lm_head_bytes: temporary memory for the LM head, in bytes; None leaves the choice to it.
        lora: the adapters to train instead of all weights, not with FP8 or experts; None for none.
        shares_prompts: whether rows have what they have in common computed once; not under context parallelism.
        seed: the run's, which the adapters begin with.
    """

    layout: Layout = Layout()
    dtype: torch.dtype = torch.bfloat16
    temperature: float = 1.0
    recompute: str = "none"
    overrides: dict[str, Any] = field(default_factory=dict)
    fp8: Fp8Options | None = None
    lm_head_bytes: int | None = None
    lora: LoraOptions | None = None
    shares_prompts: bool = False
    seed: int = 0

    @property
    def fp8_primary_weights(self) -> bool:
        """True if the decoder's matrices are kept only in FP8, and only the optimizer has their exact values."""
        return self.fp8 is not None and self.fp8.primary_weights

    def fields(self) -> dict[str, Any]:
        """The TransformerConfig fields that these options set."""
        recompute: dict[str, Any] = {}
        if self.recompute == "full":
            recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        elif self.recompute == "selective":
            # Megatron's default, core attention, saves nothing where attention is fused. A layer has one of these two.
            recompute = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
        # The emulation of FP8 takes place in the portable layers.
        fused = has_transformer_engine() and not (self.fp8 and self.fp8.emulated)
        ranks = self.layout.tensor_model_parallel_size if self.layout.sequence_parallel else 1
        return {
            "sequence_parallel": ranks > 1,
            "token_multiple": ranks * (self.fp8.alignment if self.fp8 else 1),
            "portable_layers": not fused,
            "shares_prompts": self.shares_prompts,
            "use_cpu_initialization": not on_cuda(),
            # The checkpoint's weights replace these; initialization still marks which parameters are shards.
            "init_method": _leave,
            "output_layer_init_method": _leave,
            "embedding_init_method": _leave,
            "masked_softmax_fusion": fused,
            "bias_activation_fusion": fused,
            "bias_dropout_fusion": fused,
            "apply_rope_fusion": fused,
            "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            # A loss callable's values add up over micro-batches and replicas: nothing is divided behind its back.
            "calculate_per_token_loss": True,
            **recompute,
            **(self.fp8.fields() if self.fp8 else {}),
            **self.overrides,
        }


def _leave(tensor: Tensor) -> Tensor:
    """An initialization that leaves the memory as it is."""
    return tensor


class PolicyGPTModel(GPTModel):
    """Megatron's GPT model; its last stage applies the head to the places that predict an action."""

    temperature: float
    real_vocab_size: int
    lm_head_bytes: int | None
    around_layers: Callable[[Packed], AbstractContextManager[Any]] = nullcontext  # while layers see a micro-batch

    def forward(self, packed: Packed, *, with_entropy: bool = True) -> Any:  # type: ignore[override]
        """Map a micro-batch to (log-probs (N,), entropies (N,) or None) of its actions, in float32, on the last stage,
        and to hidden states on the others."""
        with self.around_layers(packed):
            hidden = super().forward(packed.tokens, packed.position_ids, None, packed_seq_params=packed.params)
        return self._log_probs(hidden, packed, with_entropy) if self.post_process else hidden

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        inputs, rotary, *others = super()._preprocess(*args, **kwargs)
        if isinstance(kwargs["packed_seq_params"], TreeParams):
            rotary = rotary[kwargs["position_ids"][0]]  # (T, 1, 1, D), token by token
        return (inputs, rotary, *others)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def _log_probs(self, hidden: Tensor, packed: Packed, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        if self.config.sequence_parallel:
            # The head's backward already sums the gradient over the group, so each rank only keeps its own part.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        for wait_for_weight in self.output_layer._forward_pre_hooks.values():  # its weight is read without a forward
            wait_for_weight(self.output_layer, ())
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        log_probs, entropy = linear_log_prob_and_entropy(
            hidden.squeeze(1)[packed.predicts],
            weight,
            packed.labels,
            temperature=self.temperature,
            vocab_size=self.real_vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            chunk_bytes=self.lm_head_bytes,
            with_entropy=with_entropy,
            # A tied weight also gets the embedding's gradient, which Megatron would then assume was already added
            # (megatron-core 0.16.1, 0.19.2: distributed/distributed_data_parallel.py, hook).
            accumulate_into_main_grad=not tied and hasattr(weight, "main_grad"),
        )
        if packed.is_local is not None:
            log_probs = gather_actions(log_probs, packed.is_local)
            entropy = None if entropy is None else gather_actions(entropy, packed.is_local)
        return log_probs, entropy


@dataclass
class LoadedModel:
    """This rank's stage of a model.

    Fields:
        hf_config: the checkpoint's configuration.
        stored: what each of the stage's parameters is in a checkpoint (:func:`stored_parameters`).
        lora: what checkpoints say of its adapters (see ``lora.folder``); None if it has none.
        after_pass: called after every pass over micro-batches, backward included.
    """

    stage: PolicyGPTModel
    hf_config: Any
    stored: dict[str, tuple[Stored, ...]]
    options: ModelOptions
    fp8: Fp8 | None = None
    lora: dict[str, Any] | None = None
    after_pass: list[Callable[[], None]] = field(default_factory=list)

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig."""
        return self.stage.config

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Forward passes within are the base model's, bit for bit."""
        adapters = adapters_of(self.stage).values()
        for each in adapters:
            each.enabled = False
        try:
            yield
        finally:
            for each in adapters:
                each.enabled = True


def load_model(
    source: str | Path, options: ModelOptions, *, with_weights: bool = True, for_training: bool = True
) -> LoadedModel:
    """Load this rank's part of the checkpoint ``source``, a folder or a name on the Hub, on the groups that
    ``groups.initialize`` made.

    Each rank reads its own parts of the tensors.

    Args:
        with_weights: False leaves the parameters unset, for a checkpoint that is loaded afterwards.
        for_training: False for a model that only runs forward; its FP8 primary weights then keep less.

    Raises:
        LayoutError: this process's device does not support the requested FP8.
        UsageError: as :func:`model_folder` and :func:`load_weights`.
    """
    if options.fp8 is not None and not options.fp8.emulated:
        major, minor = (torch.version.cuda or "0.0").split(".")[:2]
        check_fp8_host(options.fp8, torch.cuda.get_device_capability(), (int(major), int(minor)))
        check_transformer_engine(options.fp8.recipe)
    folder = model_folder(source, weights=with_weights)
    config = read_config(folder)
    # The cache of this method (an lru_cache in Megatron 0.16.1 and 0.19.2) keeps embeddings, and each keeps a group.
    groups.at_destroy(RotaryEmbedding.forward.cache_clear)
    with megatron_calls():
        with torch.set_grad_enabled(for_training):  # which Transformer Engine's FP8 weights go by
            stage = _build_stage(config, options).to(device())
        stored = stored_parameters(stage, config)
        if with_weights:
            with fp8_weights.loading(stage, for_training=for_training):
                load_weights(stage, stored, folder)
        fp8 = Fp8(options.fp8, stage, for_training=for_training) if options.fp8 else None
        lora = None
        if options.lora is not None:
            assert fp8 is None and stage.config.num_moe_experts is None, "adapters go with neither FP8 nor experts"
            names = add_adapters(stage, stored, options.lora, options.seed)
            lora = from_first_rank(partial(description, options.lora, names, folder), UsageError)
    return LoadedModel(stage, config, stored, options, fp8, lora)


def _build_stage(hf_config: Any, options: ModelOptions) -> PolicyGPTModel:
    assert parallel_state.get_tensor_model_parallel_world_size() == options.layout.tensor_model_parallel_size
    config = megatron_config(hf_config, options.layout, options.dtype, options.fields())
    stage = PolicyGPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=ModelShape.of(hf_config).padded_vocab_size(options.layout.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        **rotary_arguments(hf_config),
    )
    stage.temperature = options.temperature
    stage.real_vocab_size = hf_config.vocab_size
    stage.lm_head_bytes = options.lm_head_bytes
    for name, parameter in stage.named_parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if EXPERTS in name:
            # Under EP, data-parallel ranks hold different experts: Megatron gives parameters marked so their own
            # gradient buffers and optimizer, reduced over the ranks that hold the same experts. By itself it marks
            # them only under EP, and a checkpoint written with EP could then not be read without it, or vice versa.
            parameter.allreduce = False
    return stage
