"""The two models behind ``cli.score``: Transformers in every process, or Megatron-core over all of them.

Imported in the ranks only: each pulls in the libraries of its backend.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf_gtpo.integration.score_rows import Row
from openrlhf_gtpo.megatron.layout import Layout

Scores = tuple[Tensor, Tensor]  # log-probs (B, A) and entropies (B, A) of a micro-batch, on the CPU


@dataclass(frozen=True)
class ScoreModel:
    """Which policy gives the numbers, and how it runs.

    Fields:
        folder: a Hugging Face checkpoint.
        backend: deepspeed (Transformers, a whole model in each process) or megatron.
        layout: parallel sizes of the Megatron backend.
        overrides: FIELD=VALUE of the Megatron backend's TransformerConfig.
        dtype: of weights and activations, bfloat16 or float32; log-probs and entropies are float32 in either case.
        temperature: of the policy, whose probabilities are softmax(logits / temperature).
        max_tokens: of a micro-batch.
    """

    folder: str
    backend: str = "deepspeed"
    layout: Layout = Layout()
    overrides: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    temperature: float = 1.0
    max_tokens: int = 8192


class Batch(NamedTuple):
    """Rows padded on the right.

    Fields:
        sequences: (B, T) token ids.
        attention_mask: (B, T), 1 at real tokens.
        action_mask: (B, T - 1), 1 at tokens to score; column j is token j + 1.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor


class Forward(NamedTuple):
    """A loaded model.

    Fields:
        fill: lengths of rows to micro-batches, as indices of rows.
        run: micro-batches to their scores, the same in every process of a replica.
        replica_size: processes that share a model; replicas are consecutive ranks.
    """

    fill: Callable[[list[int]], list[list[int]]]
    run: Callable[[Sequence[Batch]], list[Scores]]
    replica_size: int


def pad(rows: Sequence[Row]) -> Batch:
    """Rows, of which one at least has a token to score, as one batch."""
    width = max(len(row.tokens) for row in rows)
    sequences = torch.zeros(len(rows), width, dtype=torch.long)
    attention, actions = torch.zeros_like(sequences), torch.zeros_like(sequences)
    for i, row in enumerate(rows):
        length = len(row.tokens)
        sequences[i, :length] = torch.tensor(row.tokens)
        attention[i, :length] = 1
        actions[i, row.first : length] = 1
    return Batch(sequences, attention, actions[:, 1:])


@contextmanager
def load(model: ScoreModel) -> Iterator[Forward]:
    """The model of this process, over the default process group."""
    with _megatron(model) if model.backend == "megatron" else _transformers(model) as forward:
        yield forward


def fill_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches for a model that computes padding too: rows × longest row is at most ``max_tokens``.

    Rows of like lengths come together, longest first. A row longer than ``max_tokens`` stands alone.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@contextmanager
def _transformers(model: ScoreModel) -> Iterator[Forward]:
    import transformers

    from openrlhf_gtpo.integration.policy_model import PolicyModel

    if torch.distributed.get_rank() > 0 or not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    device = torch.device(torch.cuda.current_device())
    causal_lm = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, dtype=getattr(torch, model.dtype), trust_remote_code=True
    )
    causal_lm.config.use_cache = False
    actor = PolicyModel(causal_lm.to(device), temperature=model.temperature).eval()
    actor.packing_samples = False

    @torch.no_grad()
    def run(batches: Sequence[Batch]) -> list[Scores]:
        results = []
        for batch in batches:
            sequences, attention_mask, action_mask = (tensor.to(device) for tensor in batch)
            log_probs, output = actor(sequences, action_mask, attention_mask, return_output=True, return_entropy=True)
            # The fallback for other architectures gives entropies of all columns.
            entropy = output.entropy[:, -action_mask.shape[1] :]
            results.append((log_probs.float().cpu(), entropy.float().cpu()))
        return results

    yield Forward(lambda lengths: fill_padded(lengths, model.max_tokens), run, replica_size=1)


@contextmanager
def _megatron(model: ScoreModel) -> Iterator[Forward]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of what a host lacks for training
        from openrlhf_gtpo.integration.micro_batches import fill
        from openrlhf_gtpo.megatron import groups, schedule
        from openrlhf_gtpo.megatron.model import ModelOptions, load_model
        from openrlhf_gtpo.megatron.overrides import parse_overrides
        from openrlhf_gtpo.megatron.packing import TokenBatch

        groups.initialize(model.layout, seed=0)
        options = ModelOptions(
            layout=model.layout,
            dtype=getattr(torch, model.dtype),
            temperature=model.temperature,
            overrides=parse_overrides(model.overrides),
        )
        loaded = load_model(model.folder, options)
        loaded.stage.eval()

        def run(batches: Sequence[Batch]) -> list[Scores]:
            results = schedule.forward(loaded.stage, loaded.config, [TokenBatch(*batch) for batch in batches])
            return [(result.log_probs, result.entropy) for result in results]

        yield Forward(lambda lengths: fill(lengths, model.max_tokens), run, model.layout.model_parallel_size)
        groups.destroy()
