"""Has a Hugging Face model on DeepSpeed compute once what its packed rows have in common.

Upstream's models pack a micro-batch's rows into one, whose position ids begin again at 0. Their decoder is given the
tree of these rows, and its hidden states are put where the rows' tokens are: heads, losses, adapters, recomputation
and ZeRO see what they always do.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from openrlhf_gtpo.shared_prompts.attention import attend, gather
from openrlhf_gtpo.shared_prompts.tree import Tree, pack_tree

NAME = "shared_prompts"  # of the attention, in Transformers


def register() -> None:
    """Make ``NAME`` an attention of Transformers in this process. Safe to call twice."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # none


def share(model: Any, last_tokens: bool = False) -> None:
    """Replace the forward pass of the decoder of ``model``, whose attention is ``NAME``.

    Args:
        last_tokens: compute also a row's last token, which predicts nothing; its hidden state is arbitrary otherwise.
    """
    decoder = getattr(model, "get_base_model", lambda: model)().base_model
    compute = decoder.forward

    def forward(
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        assert attention_mask is None and position_ids is not None and len(input_ids) == 1, "rows come packed"
        begins = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        rows = input_ids[0].cpu().tensor_split(begins[1:])
        tree = pack_tree(rows, [len(row) - (not last_tokens) for row in rows])
        tokens, positions, places = (t.to(input_ids.device) for t in (tree.tokens, tree.position_ids, tree.places))
        output = compute(tokens[None], attention_mask=None, position_ids=positions[None], tree=tree, **others)
        output["last_hidden_state"] = gather(output["last_hidden_state"][0], places)[None]
        return output

    decoder.forward = forward


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
    """Called as Transformers calls it: (1, heads, T, D) to (1, T, heads, D)."""
    assert attention_mask is None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(q, k, v, tree, scaling)[None], None
