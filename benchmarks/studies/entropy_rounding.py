"""Measures how far rounding alone moves the entropies of one bf16 model: from vLLM's sampler, from one forward pass
over the whole response, from decoding token by token, and from a forward pass in float32.

    python3 -m benchmarks.studies.entropy_rounding DUMP --model MODEL --output entropy_rounding.json

DUMP comes from a step sampled by MODEL's weights with --rollout.entropy sampler, such as a run's first step.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.suite.harness import print_table
from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.report.rollouts import read_dump

PAIRS = [
    ("sampler", "forward"),
    ("token by token", "forward"),
    ("forward", "float32"),
    ("token by token", "float32"),
    ("sampler", "float32"),
]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=64, help="responses, the first ones of the dump")
    args = parser.parse_args()

    dump = read_dump(args.dump)
    temperature = dump.settings["temperature"]
    rounded = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).float().eval()
    columns = (dump.columns[name].rows()[: args.rows] for name in ("prompt_tokens", "tokens", "mask", "entropy"))
    entropies: dict[str, list[Tensor]] = {"sampler": [], "forward": [], "token by token": [], "float32": []}
    for prompt, tokens, mask, sampled in zip(*columns, strict=True):
        row, start, action = torch.tensor([prompt + tokens]), len(prompt), torch.tensor(mask)
        ways = {
            "sampler": torch.tensor(sampled).double(),
            "forward": entropy(rounded(row).logits[0, start - 1 : -1], temperature),
            "token by token": entropy(token_by_token(rounded, row, start), temperature),
            "float32": entropy(exact(row).logits[0, start - 1 : -1], temperature),
        }
        for name, values in ways.items():
            entropies[name].append(values[action])
    results: dict[str, Any] = {}
    for name, reference in PAIRS:
        difference = torch.cat(entropies[name]) - torch.cat(entropies[reference])
        size = difference.abs()
        results[f"{name} - {reference}"] = {
            "mean": difference.mean().item(),
            "standard_error": (difference.std() / len(difference) ** 0.5).item(),
            "mean_size": size.mean().item(),
            "p99_size": size.quantile(0.99).item(),
        }
    tokens = len(torch.cat(entropies["float32"]))
    rows = [[pair, *(f"{value:.4f}" for value in values.values())] for pair, values in results.items()]
    print_table(f"entropies of {tokens} tokens, nats", ["", "mean", "s.e.", "mean |.|", "p99 |.|"], rows)
    write_results(args.output, args, {"tokens": tokens, "differences": results})


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Compute (T,) entropies in nats and float64 from (T, V) logits of any dtype."""
    log_probs = torch.log_softmax(logits.double() / temperature, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def token_by_token(model: Any, row: Tensor, start: int) -> Tensor:
    """Compute (T, V) logits of the tokens of ``row`` (1, L) from ``start`` on like an engine: the prompt at once, then
    token by token with a KV cache."""
    output = model(row[:, :start], use_cache=True, logits_to_keep=1)
    logits = [output.logits[0]]
    for at in range(start, row.size(1) - 1):
        output = model(row[:, at : at + 1], past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0])
    return torch.cat(logits)


if __name__ == "__main__":
    with torch.no_grad():
        main()
