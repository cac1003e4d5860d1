"""Measures the distance of the sampling policy from the trained one if adapters are merged into bfloat16 weights with
nearest rounding, and with the dithered rounding of ``openrlhf_gtpo.lora.merge``.

    python3 -m benchmarks.studies.lora_merge --output docs/results/lora/merge.json   SmolLM2-135M, a few minutes

Adapters of rank 16 learn a text. After some steps both merges are compared with the exact sum in float32, so that only
the merge differs. ``bf16`` uses the exact weights, but computes in bfloat16.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.lora.init import initial_a
from openrlhf_gtpo.training.actors import adapters

TEXT = (
    "A train leaves the harbour at nine with 48 passengers. At the first stop half of them get off and 17 get on; at "
    "the second 5 get off. How many arrive? After the first stop there are 24 + 17 = 41, and 41 - 5 = 36 arrive."
)
STEPS = (1, 5, 10, 20)

Merge = Callable[[adapters.Part], Tensor]


def nearest(part: adapters.Part) -> Tensor:
    """Round the sum to the nearest bfloat16."""
    assert part.adapter is not None
    a, b, scale = part.adapter
    return torch.addmm(part.weight.data, b.data, a.data, alpha=scale).bfloat16()


def dithered(part: adapters.Part) -> Tensor:
    """Merge as for engines."""
    return part.value(torch.bfloat16)


MERGES: dict[str, Merge] = {"nearest": nearest, "dithered": dithered}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default=".cache/quickstart/smollm2-135m-instruct", help="folder of the base")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters; alpha is twice that (default: 16)")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-5, 1e-4], metavar="X")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures to this JSON file")
    args = parser.parse_args()
    rows = [row for rate in args.learning_rates for row in _learn(args.model, args.rank, rate)]
    write_results(args.output, args, {"rows": rows})


def _learn(folder: str, rank: int, rate: float) -> list[dict[str, Any]]:
    """Train with a learning rate; return a row for each of ``STEPS``."""
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    noise = _log_probs(rounded, tokens)
    base = rounded.float()
    own = _distance("bf16", _log_probs(base, tokens), noise, tokens)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", bias="none", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    parts = [part for part in adapters.parts(model) if part.adapter]
    for part in parts:
        assert part.adapter is not None
        part.adapter.a.data.copy_(initial_a(rank, part.weight.shape[1], part.name, seed=0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0)
    rows = []
    for step in range(1, max(STEPS) + 1):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            rows.append({"learning_rate": rate, "step": step} | _compare(model, parts, tokens) | own)
            print("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
    return rows


@torch.no_grad()
def _compare(model: Any, parts: list[adapters.Part], tokens: Tensor) -> dict[str, float]:
    """Compare the base and each merge with the exact policy, and time the merges (processor time)."""
    exact = _log_probs(model, tokens)
    bases = [part.weight.data.clone() for part in parts]
    found: dict[str, float] = {}
    with model.disable_adapter():
        found |= _distance("base", exact, _log_probs(model, tokens), tokens)
        for name, merged in MERGES.items():
            started = time.process_time()
            weights = [merged(part).float() for part in parts]
            found[f"{name}_seconds"] = time.process_time() - started
            changed = sum(int((weight != base).sum()) for weight, base in zip(weights, bases, strict=True))
            found[f"{name}_changed"] = changed / sum(base.numel() for base in bases)
            _set(parts, weights)
            found |= _distance(name, exact, _log_probs(model, tokens), tokens)
            _set(parts, bases)
    return found


def _set(parts: list[adapters.Part], weights: list[Tensor]) -> None:
    for part, weight in zip(parts, weights, strict=True):
        part.weight.data.copy_(weight)


@torch.no_grad()
def _log_probs(model: Any, tokens: Tensor) -> Tensor:
    """Log-probs of the whole vocabulary at each position, (T - 1, V), from the model's logits."""
    return model(tokens).logits[0, :-1].float().log_softmax(-1)


def _distance(name: str, exact: Tensor, other: Tensor, tokens: Tensor) -> dict[str, float]:
    """Mean KL(exact || other) over positions, and the largest difference of the log-probs of the text's tokens."""
    divergence = (exact.double().exp() * (exact.double() - other.double())).sum(-1).mean()
    difference = (exact - other).gather(1, tokens[0, 1:, None]).abs().max()
    return {f"{name}_kl": float(divergence), f"{name}_most": float(difference)}


if __name__ == "__main__":
    main()
