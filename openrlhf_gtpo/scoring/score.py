"""Per-token log-probs and entropies of given sequences, without training: the engine of ``cli.score``.

The whole input is checked before any process starts. Then rank 0 reads it a block at a time, every model replica
scores its share of the block's micro-batches, and rank 0 writes the block. The model is a Transformers model in every
process, or one Megatron-core model over all of them.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform.processes import is_first_process, run_processes
from openrlhf_gtpo.scoring.inputs import Row, RowFile, ScoreModel
from openrlhf_gtpo.token_values import MicroBatch, TokenValues

BLOCK_ROWS = 1024  # rows in memory at once, from which micro-batches are filled


class Forward(NamedTuple):
    """A loaded model.

    Fields:
        fill: turns the lengths of rows into micro-batches of row indices.
        run: turns micro-batches into the values of their actions, (N,) each, row after row, on the CPU. All processes
            of a replica get the same.
        replica_size: number of processes that share a model; the ranks of a replica are consecutive.
    """

    fill: Callable[[list[int]], list[list[int]]]
    run: Callable[[Sequence[MicroBatch]], list[TokenValues]]
    replica_size: int


def score(model: ScoreModel, source: RowFile, target: Path, processes: int) -> None:
    """Write a JSON line with ``log_probs`` and ``entropies`` for every line of ``source``, in its order.

    ``target`` appears only when it is complete, and replaces an earlier one.

    Args:
        processes: world size, a whole number of model replicas.

    Raises:
        UsageError: a line cannot be scored, there is none, or the target cannot be written; before any process starts.
        LaunchError, ProcessFailed: see :func:`openrlhf_gtpo.platform.processes.run_processes`.
    """
    total = sum(1 for _ in source.rows())
    if not total:
        raise UsageError(f"--input {source.path} is empty; give at least one line.")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        unfinished.touch()
        run_processes(score_rank, processes, model, source, unfinished, total)
        if is_first_process():
            unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def score_rank(model: ScoreModel, source: RowFile, target: Path, total: int) -> None:
    """Score this rank's share; rank 0 also reads and writes."""
    first = dist.get_rank() == 0
    rows = source.rows() if first else iter(())
    load = _megatron if model.backend == "megatron" else _transformers
    with load(model) as forward, target.open("w") if first else nullcontext() as file:
        # disable=None: hidden if stderr is not a terminal
        with tqdm(total=total, unit="row", desc="score", disable=None if first else True) as progress:
            while True:
                block = [list(islice(rows, BLOCK_ROWS))]
                dist.broadcast_object_list(block)
                if not block[0]:
                    return
                scores = _score_block(forward, block[0])
                if file is not None:
                    file.writelines(_lines(source, block[0], scores))
                    progress.update(len(block[0]))


def _score_block(forward: Forward, rows: list[Row]) -> dict[int, Any]:
    """Return float32 log-probs and entropies, (scored tokens,) each, by row index; filled only on rank 0.

    Rows without a token to score have no entry.
    """
    scored = [i for i, row in enumerate(rows) if row.scored]
    if not scored:
        return {}
    micro_batches = [[scored[i] for i in batch] for batch in forward.fill([len(rows[i].tokens) for i in scored])]
    replica, place = divmod(dist.get_rank(), forward.replica_size)
    replica_batches = micro_batches[replica :: dist.get_world_size() // forward.replica_size]
    tokens = {i: torch.tensor(rows[i].tokens) for i in scored}
    results = forward.run(
        [[(tokens[i], torch.arange(len(tokens[i])) >= rows[i].first) for i in part] for part in replica_batches]
    )
    scores: dict[int, Any] = {}
    if place == 0:
        for members, result in zip(replica_batches, results, strict=True):
            row_values = torch.stack(result).split([rows[i].scored for i in members], dim=1)
            scores.update(zip(members, (both.numpy() for both in row_values), strict=True))
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(scores, gathered)
    return {row: row_scores for part in gathered or () for row, row_scores in part.items()}


def _lines(source: RowFile, rows: list[Row], scores: dict[int, Any]) -> Iterator[str]:
    for i, row in enumerate(rows):
        # Enough digits to read the same float32 back.
        log_probs, entropies = ([float(str(value)) for value in values] for values in scores.get(i, ((), ())))
        assert len(log_probs) == len(entropies) == row.scored
        if not all(map(math.isfinite, log_probs + entropies)):
            raise UsageError(
                f"{source.path}:{row.line}: the model gives values that are not finite; look at its weights, or give "
                "--dtype float32."
            )
        yield json.dumps({**row.kept, "log_probs": log_probs, "entropies": entropies}) + "\n"


def fill_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill micro-batches for a model that computes padding too: rows × longest row is at most ``max_tokens``.

    Rows of similar length are grouped, longest first. A row longer than ``max_tokens`` is alone in its micro-batch.
    ``fill_micro_batches`` is for packed rows and bounds only real tokens: a long row with many short ones could pad to
    many times ``max_tokens``.
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

    from openrlhf_gtpo.training.actors.policy_model import PolicyModel

    if dist.get_rank() > 0 or not sys.stderr.isatty():
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
            # Other architectures use a fallback with entropies over all columns.
            entropy = output.entropy[:, -mask.shape[1] :]
            results.append(TokenValues(log_probs[mask].float().cpu(), entropy[mask].float().cpu()))
        return results

    yield Forward(lambda lengths: fill_padded(lengths, model.max_tokens), run, replica_size=1)


@contextmanager
def _megatron(model: ScoreModel) -> Iterator[Forward]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's warnings about what a host lacks for training
        from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
        from openrlhf_gtpo.megatron.parallel import groups
        from openrlhf_gtpo.megatron.train import schedule
        from openrlhf_gtpo.training.actors.micro_batches import fill_micro_batches
        from openrlhf_gtpo.training.settings.megatron_flags import refusals_name_flags
        from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides

        groups.initialize(model.layout, seed=0)
        options = ModelOptions(
            layout=model.layout,
            dtype=getattr(torch, model.dtype),
            temperature=model.temperature,
            overrides=parse_overrides(model.overrides),
            fp8=model.fp8,
        )
        with refusals_name_flags():  # if this GPU does not support the FP8 recipe
            loaded = load_model(model.folder, options, for_training=False)

        yield Forward(
            lambda lengths: fill_micro_batches(lengths, model.max_tokens),
            partial(schedule.forward, loaded),
            model.layout.model_parallel_size,
        )
        groups.destroy()
