"""OpenRLHF's ``Actor`` with its LM head applied to response tokens only, a chunk of logits at a time.

Upstream projects every position, prompts and padding included, to fp32 logits over the vocabulary. Here the Hugging
Face model runs with its head switched to the identity, and ``linear_log_prob_and_entropy`` turns the hidden states of
action tokens into log-probs and entropies of the temperature-scaled policy.
"""

from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from openrlhf_gtpo.token_values import place
from openrlhf_gtpo.training.actors import shared_prompts

# Architectures whose logits are exactly lm_head(hidden): no soft cap, no scale after the head.
PLAIN_HEADS = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "olmo3", "smollm3"}
)


class PolicyModel(Actor):
    """Drop-in replacement for ``Actor``: the same arguments and log-probs, and on request entropies at action tokens.

    Falls back to upstream's forward if the head cannot be taken off: other architectures, ring attention, ZeRO-3,
    DeepSpeed's tensor parallelism, adapters on the head, images, or a caller that wants logits. Where prompts are
    shared, ZeRO-3's head computes logits of the actions alone.
    """

    def forward(  # type: ignore[override]
        self,
        sequences: torch.LongTensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        *,
        return_entropy: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: Any = None,
        **others: Any,
    ) -> Any:
        """Map (B, T) tokens to (B, A) log-probs of action tokens, 0 where ``action_mask`` (B, A) is 0.

        With ``return_output``, also return the model's output, without logits; with ``return_entropy``, its
        ``entropy`` (B, A) is set.
        """
        # Without a plain head, or for a caller that wants all logits: upstream's forward.
        head = self._plain_head()
        shared = shared_prompts.are_shared(self.model)
        whole = action_mask is None or attention_mask is None or ring_attn_group is not None or others
        if whole or (head is None and not shared):
            others |= {"return_entropy": return_entropy, "ring_attn_group": ring_attn_group}
            others["packed_seq_lens"] = packed_seq_lens
            return super().forward(sequences, action_mask, attention_mask, return_output, **others)
        assert return_output or not return_entropy, "entropies come with the output"
        assert action_mask is not None and attention_mask is not None
        actions = action_mask.bool()
        num_actions = actions.shape[1]
        # The hidden state at column t predicts the token at t + 1; action columns are the last ones.
        predicts = torch.nn.functional.pad(actions, (sequences.shape[1] - num_actions - 1, 1))
        labels = sequences[:, -num_actions:][actions]
        # Hidden states and the head at the actions alone; ZeRO-3's head, which is sharded, makes logits there.
        if head is None:
            output, logits = self._logits_of_actions(sequences, attention_mask, predicts)
            log_probs = log_probs_from_logits(logits, labels)
            entropy = compute_entropy(logits) if return_entropy else None
        else:
            head.forward = lambda hidden: hidden  # type: ignore[method-assign]
            try:
                output, hidden = self._hidden_states(sequences, attention_mask, predicts)
            finally:
                del head.forward
            log_probs, entropy = linear_log_prob_and_entropy(
                hidden,
                head.weight,
                labels,
                temperature=self.temperature,
                bias=head.bias,
                with_entropy=return_entropy,
            )
        if entropy is not None:
            output.entropy = place(entropy, actions)
        action_log_probs = place(log_probs, actions)
        return (action_log_probs, output) if return_output else action_log_probs

    def _hidden_states(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor, predicts: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """The model's output and its hidden states (N, H) where ``predicts`` (B, T) is True."""
        if shared_prompts.are_shared(self.model):
            inputs, places = shared_prompts.inputs(sequences, attention_mask, predicts)
            output = self.model(**inputs)
            return output, shared_prompts.gather(output["logits"][0], places)
        valid = attention_mask.bool()
        position_ids = attention_mask.long().cumsum(-1) - 1
        if self.packing_samples:
            # One row of all real tokens; positions that start again at 0 tell transformers where sequences begin.
            output = self.model(
                sequences[valid].unsqueeze(0), attention_mask=None, position_ids=position_ids[valid].unsqueeze(0)
            )
            return output, output["logits"][0][predicts[valid]]
        position_ids.masked_fill_(~valid, 1)
        output = self.model(sequences, attention_mask=attention_mask, position_ids=position_ids)
        return output, output["logits"][predicts]

    def _logits_of_actions(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor, predicts: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """The model's output, and its (N, V) float32 logits over the temperature where ``predicts`` (B, T) is True."""
        inputs, places = shared_prompts.inputs(sequences, attention_mask, predicts)
        output = self.model(**inputs, logits_to_keep=places)
        return output, output["logits"][0].float() / self.temperature

    def _plain_head(self) -> torch.nn.Linear | None:
        model: Any = getattr(self.model, "module", self.model)
        head: Any = model.get_output_embeddings() if model.config.model_type in PLAIN_HEADS else None
        return head if type(head) is torch.nn.Linear and not hasattr(head.weight, "ds_id") else None
