"""Shared prompts on DeepSpeed: a Hugging Face model computes a prompt once for all rows of a micro-batch that have it.

:class:`PolicyModel` passes the decoder the tree of a micro-batch's rows, and its head the places that predict actions.
Upstream's critic and reward model pack rows into one, in which position ids start at 0 again for each row. Here their
decoder gets the tree of these rows, and its hidden states return to the places of the rows' tokens.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from openrlhf_gtpo.shared_prompts.attention import attend, gather
from openrlhf_gtpo.shared_prompts.tree import Tree, pack_tree

NAME = "shared_prompts"  # of the attention, in Transformers


def register() -> None:
    """Register the attention ``NAME`` with Transformers in this process. Safe to call twice."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # none


def share(model: Any, last_tokens: bool = False) -> None:
    """Let the decoder of ``model``, whose attention is ``NAME``, compute shared prompts once.

    Args:
        last_tokens: also compute a row's last token, which predicts nothing; without, its hidden state is arbitrary.
    """
    decoder = getattr(model, "get_base_model", lambda: model)().base_model
    compute = decoder.forward

    def forward(
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        if "tree" in others:
            return compute(input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)
        assert attention_mask is None and position_ids is not None and len(input_ids) == 1, "rows come packed"
        begins = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        rows = input_ids[0].cpu().tensor_split(begins[1:])
        tree = pack_tree(rows, [len(row) - (not last_tokens) for row in rows])
        tokens, positions, places = (t.to(input_ids.device) for t in (tree.tokens, tree.position_ids, tree.places))
        output = compute(tokens[None], attention_mask=None, position_ids=positions[None], tree=tree, **others)
        output["last_hidden_state"] = gather(output["last_hidden_state"][0], places)[None]
        return output

    decoder.forward = forward


def are_shared(model: Any) -> bool:
    """True after :func:`share` of ``model``, or of the model that DeepSpeed's engine or PEFT wraps."""
    return getattr(getattr(model, "module", model).config, "_attn_implementation", None) == NAME


def inputs(
    sequences: torch.Tensor, attention_mask: torch.Tensor, predicts: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the arguments of a model after :func:`share` for padded rows (B, T), and the (N,) places in its output
    where ``predicts`` (B, T) is True, row after row. Tokens that no prediction needs are left out."""
    valid = attention_mask.bool()
    ids, marks = sequences[valid].cpu(), predicts[valid].cpu()
    ends = valid.sum(1).cumsum(0)[:-1].tolist()
    rows, places = ids.tensor_split(ends), marks.tensor_split(ends)
    needed = [int(mark.nonzero().max()) + 1 if mark.any() else 0 for mark in places]
    tree = pack_tree(rows, needed)
    tokens, positions, found = (
        t.to(sequences.device) for t in (tree.tokens[None], tree.position_ids[None], tree.places[marks])
    )
    return {"input_ids": tokens, "attention_mask": None, "position_ids": positions, "tree": tree}, found


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: Tree,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the signature of Transformers: (1, heads, T, D) to (1, T, heads, D)."""
    assert attention_mask is None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(q, k, v, tree, scaling)[None], None
