"""The two models behind ``cli.score``: Transformers in every process, or Megatron-core over all of them."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from openrlhf_gtpo.scoring.inputs import ScoreModel
from openrlhf_gtpo.token_values import MicroBatch, TokenValues


class Forward(NamedTuple):
    """A loaded model.

    Fields:
        fill: lengths of rows to micro-batches, as indices of rows.
        run: micro-batches to their actions' values, (N,) each, row after row, on the CPU; the same in every process
            of a replica.
        replica_size: processes that share a model; replicas are consecutive ranks.
    """

    fill: Callable[[list[int]], list[list[int]]]
    run: Callable[[Sequence[MicroBatch]], list[TokenValues]]
    replica_size: int


def load(model: ScoreModel) -> AbstractContextManager[Forward]:
    """The model of this process, over the default process group."""
    return _megatron(model) if model.backend == "megatron" else _transformers(model)


def fill_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches for a model that computes padding too: rows × longest row is at most ``max_tokens``.

    Rows of like lengths come together, longest first. A row longer than ``max_tokens`` stands alone. The ``fill`` of
    packed rows bounds only real tokens: of a long row and many short ones it makes a micro-batch whose padding is many
    times ``max_tokens``.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
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
    def run(micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
        results = []
        for rows in micro_batches:
            sequences = pad_sequence([tokens for tokens, _ in rows], batch_first=True)
            valid = pad_sequence([torch.ones_like(tokens) for tokens, _ in rows], batch_first=True)
            mask = pad_sequence([actions for _, actions in rows], batch_first=True)[:, 1:].to(device)
            log_probs, output = actor(
                sequences.to(device), mask.long(), valid.to(device), return_output=True, return_entropy=True
            )
            # The fallback for other architectures gives entropies of all columns.
            entropy = output.entropy[:, -mask.shape[1] :]
            results.append(TokenValues(log_probs[mask].float().cpu(), entropy[mask].float().cpu()))
        return results

    yield Forward(lambda lengths: fill_padded(lengths, model.max_tokens), run, replica_size=1)


@contextmanager
def _megatron(model: ScoreModel) -> Iterator[Forward]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of what a host lacks for training
        from openrlhf_gtpo.integration.actors.micro_batches import fill
        from openrlhf_gtpo.integration.command_line.megatron_flags import refusals_name_flags
        from openrlhf_gtpo.integration.command_line.megatron_overrides import parse_overrides
        from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
        from openrlhf_gtpo.megatron.parallel import groups
        from openrlhf_gtpo.megatron.train import schedule

        groups.initialize(model.layout, seed=0)
        options = ModelOptions(
            layout=model.layout,
            dtype=getattr(torch, model.dtype),
            temperature=model.temperature,
            overrides=parse_overrides(model.overrides),
            fp8=model.fp8,
        )
        with refusals_name_flags():  # what this GPU cannot do in FP8
            loaded = load_model(model.folder, options, for_training=False)

        yield Forward(
            lambda lengths: fill(lengths, model.max_tokens),
            partial(schedule.forward, loaded),
            model.layout.model_parallel_size,
        )
        groups.destroy()
