"""A micro-batch whose prompts are computed once has the log-probs, entropies and gradients of its rows one by one."""

from typing import Any

import pytest
import torch
import transformers
from openrlhf.models.model import _get_reward_model

from openrlhf_gtpo.shared_prompts.tree import Tree
from openrlhf_gtpo.training.actors import shared_prompts
from openrlhf_gtpo.training.actors.policy_model import PLAIN_HEADS, PolicyModel

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 3,
    "attn_implementation": "sdpa",
}
CLASSES = {"qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3"}

Rows = list[tuple[torch.Tensor, torch.Tensor]]


def causal_lm(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    name = CLASSES.get(family, family.capitalize())
    sizes = SIZES | ({"sliding_window": 512} if family == "olmo3" else {})  # which no layer here has
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    model.config.use_cache = False
    return model


def group(seed: int, prompt: int, responses: list[int]) -> Rows:
    """Rows of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    begin = torch.randint(1, VOCABULARY, (prompt,), generator=generator)
    rows = []
    for length in responses:
        ids = torch.cat([begin, torch.randint(1, VOCABULARY, (length,), generator=generator)])
        rows.append((ids, torch.arange(len(ids)) >= prompt))
    return rows


def two_turns() -> Rows:
    """A group whose environment says different things between the turns, behind the beginning of another prompt."""
    rows = group(3, 9, [4, 2, 7])
    generator = torch.Generator().manual_seed(4)
    for number, (ids, actions) in enumerate(rows):
        more = torch.randint(1, VOCABULARY, (3 + number + 5,), generator=generator)
        acts = torch.arange(len(more)) >= 3 + number
        rows[number] = torch.cat([ids, more]), torch.cat([actions, acts])
    ids = torch.cat([rows[0][0][:6], torch.randint(1, VOCABULARY, (8,), generator=generator)])
    return [*rows, (ids, torch.arange(14) >= 10)]


CASES: dict[str, Rows] = {
    "a group": group(1, 23, [1, 2, 17, 9, 30, 4, 8, 12]),
    "groups of 8, 1 and 3, mixed": [
        row for rows in zip(group(1, 23, [1, 2, 17, 9]), group(2, 5, [70, 3, 1, 2])) for row in rows
    ],
    "nothing in common": [row for seed in range(4) for row in group(10 + seed, 1 + 7 * seed, [5 + seed])],
    "several turns": two_turns(),
    "equal rows": [*group(5, 11, [6]), *group(5, 11, [6]), *group(6, 3, [2])],
    "long segments": group(7, 130, [90, 3, 70]),
}


def padded(rows: Rows) -> dict[str, torch.Tensor]:
    """Right-padded, as upstream's batches."""
    width = max(len(ids) for ids, _ in rows)

    def pad(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t in tensors])

    return {
        "sequences": pad([ids for ids, _ in rows]),
        "attention_mask": pad([torch.ones_like(ids) for ids, _ in rows]),
        "action_mask": pad([actions.long() for _, actions in rows])[:, 1:],
    }


def values_and_gradients(actor: PolicyModel, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Of the actions of all rows: log-probs, entropies, and the gradients of a loss that weighs each differently."""
    actor.model.zero_grad()
    data = padded(rows)
    log_probs, output = actor(**data, return_output=True, return_entropy=True)
    mask = data["action_mask"].bool()
    entropy = output.entropy[:, -mask.shape[1] :]
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    ((log_probs + 0.1 * entropy) * weights).sum().backward()
    return log_probs[mask].detach(), entropy[mask].detach(), {n: p.grad for n, p in actor.model.named_parameters()}


def test_a_reward_model_reads_last_tokens() -> None:
    """Upstream's, whose rewards are of rows' last tokens; a critic is in ``test_optimizer_steps.py``."""
    shared_prompts.register()
    config = transformers.LlamaConfig(**SIZES)
    config.normalize_reward = False
    kind = _get_reward_model(transformers.LlamaPreTrainedModel, transformers.LlamaModel, packing_samples=True)
    rewards = []
    for shares in (False, True):
        torch.manual_seed(0)
        model = kind(config).eval()
        model.packing_samples = shares
        if shares:
            model.set_attn_implementation(shared_prompts.NAME)
            shared_prompts.share(model, last_tokens=True)
        data = padded(CASES["a group"])
        with torch.no_grad():
            rewards.append(model(data["sequences"], data["attention_mask"]))
    torch.testing.assert_close(*rewards, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", sorted(PLAIN_HEADS))
def test_values_and_gradients_are_those_of_rows_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_prompts.register()
    packed: list[Tree] = []
    pack = shared_prompts.pack_tree
    monkeypatch.setattr(shared_prompts, "pack_tree", lambda *a: packed.append(pack(*a)) or packed[-1])
    alone = PolicyModel(causal_lm(family))
    alone.packing_samples = False
    together = PolicyModel(causal_lm(family))
    together.packing_samples = True
    together.model.set_attn_implementation(shared_prompts.NAME)
    shared_prompts.share(together.model)
    for name, rows in CASES.items():
        expected, found = values_and_gradients(alone, rows), values_and_gradients(together, rows)
        for ours, theirs in zip(found[:2], expected[:2]):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)
        for parameter, gradient in expected[2].items():
            scale = float(gradient.abs().max()) or 1.0
            torch.testing.assert_close(
                found[2][parameter] / scale, gradient / scale, rtol=0, atol=1e-5, msg=f"{name}, {parameter}"
            )
    computed = dict(zip(CASES, (len(tree.tokens) for tree in packed)))
    assert computed["a group"] == 23 + sum(n - 1 for n in [1, 2, 17, 9, 30, 4, 8, 12])
