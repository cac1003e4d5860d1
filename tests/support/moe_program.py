"""Checkpoints, layouts and reference tensors for the tests of mixtures of experts, and what ranks run only in them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from tests.support.families import SHALLOW, make_checkpoint
from tests.support.logits_program import all_actions, on

EXPERTS, CHOSEN, WIDTH = 4, 2, 48
LAYOUTS = {
    "TP1": Layout(),
    "TP2-SP": Layout(tensor_model_parallel_size=2, sequence_parallel=True),
    "EP2": Layout(expert_model_parallel_size=2),
    "EP4": Layout(expert_model_parallel_size=4),
    "PP2xEP2": Layout(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
    "TP2-SPxEP2": Layout(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2),
}
# Vocabulary, other fields. The second weighs experts by the softmax over all of them, its head is tied, and it has two
# layers per stage at PP2.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "normalised": (151, SHALLOW | {"norm_topk_prob": True}),
    "as-they-are-tied": (896, {"norm_topk_prob": False, "tie_word_embeddings": True}),
}


def make_mixture(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write the checkpoint ``name`` of :data:`MODELS`."""
    vocab_size, fields = MODELS[name]
    shape = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": WIDTH}
    return make_checkpoint(directory, "qwen3_moe", vocab_size, seed=seed, **shape, **fields)


def by_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split a Transformers model's tensors, which hold all experts of a layer, into those that its checkpoint has."""
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", name)
        if match is None:
            found[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = np.split(expert, 2) if match[2] == "gate_up" else [expert]
            for part, kind in zip(parts, ("gate", "up") if match[2] == "gate_up" else ("down",), strict=True):
                found[f"{match[1]}.{i}.{kind}_proj.weight"] = part
    return found


def uneven_log_probs(source: str, layout: Layout, micro_batches: list[list[list[int]]]) -> list[Any]:
    """(N,) log-probs per micro-batch: the first replica has none, the second has one, the third has two, and so on."""
    from megatron.core import parallel_state

    with on(layout):
        model = load_model(source, ModelOptions(layout=layout, dtype=torch.float32))
        model.stage.eval()
        mine = micro_batches[: parallel_state.get_data_parallel_rank()]
        batches = [all_actions(rows) for rows in mine]
        return [statistics.log_probs.numpy() for statistics in schedule.forward(model, batches)]
