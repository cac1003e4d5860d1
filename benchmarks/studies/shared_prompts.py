"""Measures the gain from computing a prompt once: old-policy forward pass and training, by (P, R, G), on both
backends.

    python3 -m benchmarks.studies.shared_prompts --output docs/results/train/shared_prompts.json

The model has SmolLM2-135M's widths and random weights. Rows have P prompt tokens and up to R response tokens, G to a
prompt. The quickstart's responses have 13 tokens on average and at most 32. The sides take turns: micro-batches of
``--micro`` padded rows (DeepSpeed's former path), the same tokens with each prompt once, and Megatron's packed rows
without and with sharing. Training is forward and backward, on Megatron with its optimizer. Peak memory is one training
call's, minus what the process held before.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo import platform

platform.choose()

# ruff: noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.suite.harness import Measured, Side, measure, median_and_range, print_table
from benchmarks.suite.random_model import random_model
from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.platform.memory import PeakMemory
from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens
from openrlhf_gtpo.token_values import MicroBatch, TokenRow
from openrlhf_gtpo.training.actors import shared_prompts
from openrlhf_gtpo.training.actors.micro_batches import fill_micro_batches
from openrlhf_gtpo.training.actors.policy_model import PolicyModel

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QUICKSTART = 32  # its maximum tokens of a response
# (layers, groups, P, R, G); the first are the quickstart's rows.
SHAPES = [(30, 16, 42, 32, 8), (30, 32, 42, 32, 1), (4, 1, 512, 128, 8), (4, 1, 2048, 256, 8)]


def draw_rows(groups_: int, prompt: int, response: int, size: int, seed: int) -> list[TokenRow]:
    """Draw rows, group by group. Prompts have three quarters to all of their length, and so do responses, except the
    quickstart's, which are mostly short."""
    generator = torch.Generator().manual_seed(seed)
    short = response == QUICKSTART

    def draw(most: int, short: bool = False) -> torch.Tensor:
        share = torch.rand(1, generator=generator).item()
        length = 1 + int((most - 1) * share**1.5) if short else most - int(share * most / 4)
        return torch.randint(3, SMOLLM2["vocab_size"], (length,), generator=generator)

    rows: list[TokenRow] = []
    for _ in range(groups_):
        begin = draw(prompt)
        for _ in range(size):
            ids = torch.cat([begin, draw(response, short)])
            rows.append((ids, torch.arange(len(ids)) >= len(begin)))
    return rows


class OnTransformers:
    """DeepSpeed's path without its engine: the policy model of ``actors/policy_model.py``."""

    def __init__(self, layers: int, rows: Sequence[TokenRow], micro: int, dtype: torch.dtype, shares: bool) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **SMOLLM2, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.config.use_cache = False
        self.actor = PolicyModel(model)
        self.actor.packing_samples = shares
        if shares:
            model.set_attn_implementation(shared_prompts.NAME)
            shared_prompts.share(model)
        lengths = [len(row[0]) for row in rows]
        parts = [list(range(len(rows)))[i : i + micro] for i in range(0, len(rows), micro)]
        self.computed = sum(len(part) * max(lengths[i] for i in part) for part in parts)
        if shares:
            prompts = [Prompt.of(*row) for row in rows]
            parts = fill_micro_batches(lengths, micro * max(lengths), prompts)
            self.computed = sum(computed_tokens(lengths, prompts, part) for part in parts)
        self.batches = [_padded([rows[i] for i in part]) for part in parts]

    @torch.no_grad()
    def forward(self) -> None:
        for batch in self.batches:
            self.actor(**batch, return_output=True, return_entropy=True)

    def train(self) -> None:
        self.actor.model.zero_grad()
        for batch in self.batches:
            (self.actor(**batch) * batch["action_mask"]).sum().backward()


class OnMegatron:
    """The Megatron actor's path, one rank."""

    def __init__(self, layers: int, rows: Sequence[TokenRow], micro: int, dtype: torch.dtype, shares: bool) -> None:
        config = AutoConfig.for_model("llama", **SMOLLM2, num_hidden_layers=layers).to_dict()
        self.model = random_model(config, ModelOptions(dtype=dtype, shares_prompts=shares), seed=0)
        self.trainer = Trainer(self.model, OptimizerOptions())
        lengths = [len(row[0]) for row in rows]
        prompts = [Prompt.of(*row) for row in rows] if shares else None
        parts = fill_micro_batches(lengths, micro * max(lengths), prompts)
        self.computed = sum(computed_tokens(lengths, prompts, part) for part in parts)
        self.batches: list[MicroBatch] = [[rows[i] for i in part] for part in parts]

    def forward(self) -> None:
        schedule.forward(self.model, self.batches)

    def train(self) -> None:
        self.trainer.step(self.batches, lambda index, log_probs, entropy: (-log_probs.sum(), None))


SIDES: dict[str, Callable[..., Any]] = {
    "padded rows": lambda *given: OnTransformers(*given, shares=False),
    "prompts once": lambda *given: OnTransformers(*given, shares=True),
    "Megatron, packed rows": lambda *given: OnMegatron(*given, shares=False),
    "Megatron, prompts once": lambda *given: OnMegatron(*given, shares=True),
}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--micro", type=int, default=32, help="rows of a micro-batch (default: 32, the quickstart's)")
    parser.add_argument("--repeat", type=int, default=5, help="measured calls of each phase and side (default: 5)")
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), metavar="N")
    processor = "default: bfloat16, which a processor without AVX512_BF16 or AMX computes slower than float32"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=processor)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures to this JSON file")
    args = parser.parse_args()
    shared_prompts.register()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    groups.initialize(Layout(), 1)
    found = []
    for layers, count, prompt, response, size in (SHAPES[number] for number in args.shapes):
        rows = draw_rows(count, prompt, response, size, seed=1)
        made = {name: make(layers, rows, args.micro, getattr(torch, args.dtype)) for name, make in SIDES.items()}
        sides: dict[str, Side] = {
            name: {"forward": side.forward, "training": side.train} for name, side in made.items()
        }
        measured = measure(sides, args.repeat)
        for name, side in made.items():
            memory = PeakMemory()
            side.train()
            measured[name].about = {"tokens": side.computed, "peak_bytes": memory.beyond()}
        shape = f"P {prompt}, R {response}, G {size}, {count} groups, {layers} layers"
        _show(shape, measured)
        found.append({"shape": shape, "sides": {name: side.as_json() for name, side in measured.items()}})
        write_results(args.output, args, {"shapes": found})
        del made, sides


def _padded(rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
    """Pad on the right, as in upstream's batches."""
    columns = [torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True) for column in zip(*rows)]
    lengths = torch.tensor([len(row[0]) for row in rows])
    mask = (torch.arange(columns[0].shape[1]) < lengths[:, None]).long()
    return {"sequences": columns[0], "attention_mask": mask, "action_mask": columns[1][:, 1:].long()}


def _show(shape: str, measured: dict[str, Measured]) -> None:
    table = []
    for name, side in measured.items():
        base = measured["Megatron, packed rows" if "Megatron" in name else "padded rows"]
        cells = [f"{side.about['tokens']:,}"]
        for phase in ("forward", "training"):
            cells += [median_and_range(side.seconds[phase]), median_and_range(side.over(base, phase))]
        peak = side.about["peak_bytes"]
        table.append((name, *cells, "" if peak is None else f"{peak / 2**20:,.0f}"))
    columns = ("side", "tokens", "forward, s", "ratio", "training, s", "ratio", "peak, MiB")
    print_table(shape, columns, table)


if __name__ == "__main__":
    main()
