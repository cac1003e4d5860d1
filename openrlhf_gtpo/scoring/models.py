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

from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.token_batch import TokenBatch, pad_right
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.scoring.rows import Row

Scores = tuple[Tensor, Tensor]  # log-probs (B, A) and entropies (B, A) of a micro-batch, on the CPU


@dataclass(frozen=True)
class ScoreModel:
    """Which policy gives the numbers, and how it runs.

    Fields:
        folder: a Hugging Face checkpoint.
        backend: deepspeed (Transformers, a whole model in each process) or megatron.
        layout: parallel sizes of the Megatron backend.
        overrides: FIELD=VALUE of the Megatron backend's TransformerConfig.
        fp8: products of the Megatron backend in FP8; None for none.
        dtype: of weights and activations, bfloat16 or float32; log-probs and entropies are float32 in either case.
        temperature: of the policy, whose probabilities are softmax(logits / temperature).
        max_tokens: of a micro-batch.
        trust_remote_code: run the Python code that the checkpoint brings.
    """

    folder: str
    backend: str = "deepspeed"
    layout: Layout = Layout()
    overrides: tuple[str, ...] = ()
    fp8: Fp8Options | None = None
    dtype: str = "bfloat16"
    temperature: float = 1.0
    max_tokens: int = 8192
    trust_remote_code: bool = False


class Forward(NamedTuple):
    """A loaded model.

    Fields:
        fill: lengths of rows to micro-batches, as indices of rows.
        run: micro-batches to their scores, the same in every process of a replica.
        replica_size: processes that share a model; replicas are consecutive ranks.
    """

    fill: Callable[[list[int]], list[list[int]]]
    run: Callable[[Sequence[TokenBatch]], list[Scores]]
    replica_size: int


def pad(rows: Sequence[Row]) -> TokenBatch:
    """Rows, of which one at least has a token to score, as one batch; what is to be scored are its actions."""
    return pad_right([(torch.tensor(row.tokens), torch.arange(len(row.tokens)) >= row.first) for row in rows])


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

    from openrlhf_gtpo.integration.actors.policy_model import PolicyModel

    if torch.distributed.get_rank() > 0 or not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    device = torch.device(torch.cuda.current_device())
    causal_lm = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, dtype=getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code
    )
    causal_lm.config.use_cache = False
    actor = PolicyModel(causal_lm.to(device), temperature=model.temperature).eval()
    actor.packing_samples = False

    @torch.no_grad()
    def run(batches: Sequence[TokenBatch]) -> list[Scores]:
        results = []
        for batch in batches:
            actions = batch.action_mask.to(device)
            log_probs, output = actor(
                batch.sequences.to(device),
                actions,
                batch.attention_mask.to(device),
                return_output=True,
                return_entropy=True,
            )
            # The fallback for other architectures gives entropies of all columns.
            entropy = output.entropy[:, -actions.shape[1] :]
            results.append((log_probs.float().cpu(), entropy.float().cpu()))
        return results

    yield Forward(lambda lengths: fill_padded(lengths, model.max_tokens), run, replica_size=1)


@contextmanager
def _megatron(model: ScoreModel) -> Iterator[Forward]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of what a host lacks for training
        from openrlhf_gtpo.integration.actors.micro_batches import fill
        from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
        from openrlhf_gtpo.megatron.parallel import groups
        from openrlhf_gtpo.megatron.train import schedule
        from openrlhf_gtpo.megatron.train.overrides import parse_overrides

        groups.initialize(model.layout, seed=0)
        options = ModelOptions(
            layout=model.layout,
            dtype=getattr(torch, model.dtype),
            temperature=model.temperature,
            overrides=parse_overrides(model.overrides),
            fp8=model.fp8,
        )
        loaded = load_model(model.folder, options, for_training=False)

        def run(batches: Sequence[TokenBatch]) -> list[Scores]:
            results = schedule.forward(loaded, batches)
            return [(result.log_probs, result.entropy) for result in results]

        yield Forward(lambda lengths: fill(lengths, model.max_tokens), run, model.layout.model_parallel_size)
        groups.destroy()
