"""A decoder-only model as numbers: its ``config.json``, its parameters by part and rank, and its operations.

Owns the one reader of ``config.json``, the one formula for floating-point operations and the one count of parameters.
The latter two describe the model that the Megatron actor builds (``megatron/families.py``), not an ideal one.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.families import FAMILIES

VOCABULARY_MULTIPLE = 128  # each rank's rows of embedding and head are padded to a multiple of it, as in Megatron


def _qwen2_5(
    hidden: int, mlp: int, layers: int, heads: int, groups: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    }


# Qwen2.5's published configurations; every width of ``tiny`` is a multiple of 128 too, so that it can run in FP8.
PRESETS = {
    "tiny": _qwen2_5(256, 512, 2, 4, 2, 512, False),
    "3b": _qwen2_5(2048, 11008, 36, 16, 2, 151936, True),
    "7b": _qwen2_5(3584, 18944, 28, 28, 4, 152064, False),
    "32b": _qwen2_5(5120, 27648, 64, 40, 8, 152064, False),
}
# Their names on the Hub; the instruction-tuned models have the same sizes.
HUB = {f"Qwen/Qwen2.5-{name.upper()}": name for name in ("3b", "7b", "32b")}
_OF_HUB = HUB | {f"{name}-Instruct": preset for name, preset in HUB.items()}


def read_config(source: str | Path) -> dict[str, Any]:
    """Read the fields of a model's ``config.json``, with its configuration class's defaults but without transformers.

    Args:
        source: a name in :data:`PRESETS` or of the same model on the Hub, a ``config.json``, or a folder with one.

    Raises:
        UsageError: ``source`` is none of these.
    """
    path, name = Path(source), _OF_HUB.get(str(source), str(source))
    if name in PRESETS and (name == source or not path.exists()):
        return dict(PRESETS[name])
    try:
        fields = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        if isinstance(fields, dict) and fields.get("model_type"):
            family = FAMILIES.get(fields["model_type"])
            return (family.defaults if family else {}) | fields
        reason = "it has no model_type"
    except OSError as error:
        reason = str(error.strerror)
    except ValueError as error:
        reason = f"it is not JSON: {error}"
    raise UsageError(
        f"{str(source)!r} is not a model that can be read ({reason}). Give one of {', '.join([*PRESETS, *HUB])}, a "
        "Hugging Face config.json, or a folder with one."
    )


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of one of the :data:`FAMILIES`, or of a similar model.

    Fields:
        hidden_size: H.
        intermediate_size: columns of the MLP, or of one expert if there are experts.
        num_attention_heads, num_key_value_heads, head_dim: sizes of the attention.
        vocab_size: entries of the vocabulary, without padding.
        tied: the head's matrix is the embedding's.
        qkv_bias: query, key and value have biases.
        qk_norm: query and key are normalized head by head.
        num_experts, experts_per_token: 0 for a dense model.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Read the shape from a Hugging Face configuration, or from any object with the fields of its ``config.json``.

        Raises:
            UsageError: a size is missing, or not a whole number from 1.
        """

        def size(*names: str, default: int | None = None) -> int:
            value = next((found for name in names if (found := getattr(config, name, None)) is not None), default)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"Expected a whole number {names[0]} >= 1 in config.json, got {value!r}.")
            return value

        kind, heads = config.model_type, size("num_attention_heads")
        family = FAMILIES.get(kind, FAMILIES["llama"])
        moe = family.has_experts
        return cls(
            model_type=kind,
            hidden_size=size("hidden_size"),
            intermediate_size=size("moe_intermediate_size" if moe else "intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=size("hidden_size") // heads),
            vocab_size=size("vocab_size"),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            num_experts=size("num_experts", "num_local_experts") if moe else 0,  # the latter since transformers 5
            experts_per_token=size("num_experts_per_tok") if moe else 0,
        )

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Columns of all key heads, and as many of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Parameters in the checkpoint: the vocabulary is not padded, a tied head counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * sum(self.layer_parameters().values()) + embeddings + self.hidden_size

    def layer_parameters(self, tensor: int = 1, expert: int = 1) -> dict[str, int]:
        """Parameters of one decoder layer on one rank, by part.

        Args:
            tensor, expert: parallel sizes. Experts are sharded over TP too.
        """
        hidden, query, key_value = self.hidden_size, self.query_width, self.key_value_width
        attention = hidden * (query + 2 * key_value) + query * hidden
        attention += (query + 2 * key_value) if self.qkv_bias else 0
        mlp = 3 * hidden * self.intermediate_size
        parts = {"attention": attention // tensor, "norms": 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)}
        if not self.num_experts:
            return parts | {"mlp": mlp // tensor}
        return parts | {"router": hidden * self.num_experts, "experts": self.num_experts // expert * mlp // tensor}

    def adapter_parameters(self, rank: int, tensor: int = 1) -> int:
        """Parameters of one decoder layer's adapters of LoRA rank ``rank`` on one process, for attention and a dense
        MLP: each matrix has one factor sharded over TP like the matrix itself, and one whole factor."""
        hidden, query, key_value = self.hidden_size, self.query_width, self.key_value_width
        whole = hidden * 3 + hidden  # A of query, key and value; B of the projection
        sharded = query + 2 * key_value + query
        if not self.num_experts:
            whole, sharded = whole + 2 * hidden + hidden, sharded + 3 * self.intermediate_size
        return rank * (whole + sharded // tensor)

    def padded_vocab_size(self, tensor: int = 1) -> int:
        """Pad the vocabulary for tensor parallelism: rows of the embedding and of the head, over all ranks."""
        multiple = VOCABULARY_MULTIPLE * tensor
        return -(-self.vocab_size // multiple) * multiple

    def embedding_parameters(self, tensor: int = 1) -> int:
        """Parameters of the embedding on one rank; the head has as many."""
        return self.padded_vocab_size(tensor) // tensor * self.hidden_size

    def stage_parameters(self, stage: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> dict[str, int]:
        """Parameters on one rank of pipeline stage ``stage`` (from 0), by part.

        A tied head is the embedding itself if both are on one stage, and a copy otherwise.
        """
        layers = self.num_layers // pipeline
        parts = {name: layers * count for name, count in self.layer_parameters(tensor, expert).items()}
        first, last = stage == 0, stage == pipeline - 1
        parts["embedding"] = self.embedding_parameters(tensor) if first else 0
        parts["head"] = self.embedding_parameters(tensor) if last and not (self.tied and first) else 0
        parts["norms"] += self.hidden_size if last else 0
        return parts


def decoder_flops(shape: ModelShape, lengths: Iterable[int]) -> int:
    """Count the floating-point operations of the decoder layers in one forward pass over sequences of these lengths.

    Only matrix products count, and a multiplication with its addition is two operations. Attention counts only what
    the causal mask keeps. Of the experts, only the ones that a token is routed to count, plus the router. Embedding
    and head are left out. A backward pass has twice as many operations. Recomputed activations add nothing.
    """
    lengths = list(lengths)
    hidden, query = shape.hidden_size, shape.query_width
    mlp = 3 * hidden * shape.intermediate_size
    if shape.num_experts:
        mlp = shape.experts_per_token * mlp + hidden * shape.num_experts
    parameters = hidden * (query + 2 * shape.key_value_width) + query * hidden + mlp
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return shape.num_layers * (2 * sum(lengths) * parameters + 2 * 2 * pairs * query)


def head_flops(shape: ModelShape, tokens: int) -> int:
    """Count the FLOPs of the LM head in a forward pass over the tokens it is applied to, without padded columns."""
    return 2 * tokens * shape.hidden_size * shape.vocab_size


def forward_flops(shape: ModelShape, lengths: Iterable[int], response_tokens: int) -> int:
    """Count the FLOPs of the whole model: :func:`decoder_flops` over all tokens, :func:`head_flops` over responses,
    because the actor applies its head only at positions that predict an action."""
    return decoder_flops(shape, lengths) + head_flops(shape, response_tokens)
