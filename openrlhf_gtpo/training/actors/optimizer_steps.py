"""Optimizer steps from a replay buffer: which rows go to which replica and micro-batch, and which micro-batch ends a
step. Also metrics that do not depend on that split, and a stop before non-finite numbers reach the weights.

A rollout may be short (end of the data, dynamic filtering) and its rows dealt unevenly. Still every replica makes the
same number of optimizer steps and, on DeepSpeed, of backward passes; a replica without a row runs an empty one.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.platform.agreement import all_gather_objects
from openrlhf_gtpo.report import names
from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens
from openrlhf_gtpo.training.actors.micro_batches import fill_micro_batches, prompts_of
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.info import off_policy_rows
from openrlhf_gtpo.training.credit.loss import StepTotals
from openrlhf_gtpo.training.credit.old_policy import count_steps

_OF_OWN_ROWS = ("ppo_kl", "vllm_kl", "is_filter_ratio")


def optimizer_steps(
    num_rows: int,
    args: Arguments,
    group: ProcessGroup,
    device: torch.device,
    shuffle: np.random.Generator | None,
) -> Iterator[np.ndarray]:
    """Yield this replica's rows in each optimizer step of a training phase: every row ``--train.max_epochs`` times.

    Args:
        num_rows: number of rows that this replica holds.
        group: the replicas' group; the call is collective over it.
        shuffle: draws the rows of each step; in later epochs only the order of the steps, so that these stay as
            balanced as they were dealt. The same on every replica. None keeps rows and steps in order.
    """
    total = torch.tensor(num_rows, device=device)
    all_reduce(total, group=group)
    if not total:
        return
    rows = shuffle.permutation(num_rows) if shuffle else np.arange(num_rows)
    steps = np.array_split(rows, count_steps(int(total), args.train.batch_size))
    yield from steps
    draw = shuffle.spawn(1)[0] if shuffle else None  # does not depend on this replica's number of rows
    for _ in range(args.train.max_epochs - 1):
        yield from (steps[step] for step in (draw.permutation(len(steps)) if draw else range(len(steps))))


class RowOrder(NamedTuple):
    """The order in which replicas train on their rows: optimizer steps of ``batch_size`` rows over all replicas,
    shuffled by a generator with ``seed``; ``shares_prompts`` if a micro-batch computes a shared prompt once."""

    batch_size: int
    seed: list[int]
    shares_prompts: bool = False


def deal_rows(
    lengths: Sequence[int], replicas: int, order: RowOrder, prompts: Sequence[Prompt] | None = None
) -> list[np.ndarray]:
    """Deal rows so that in every optimizer step each replica has about as many tokens; returns each replica's rows in
    the order of its replay buffer.

    A step has the rows, and a replica the number of rows, that it would have with equal chunks of consecutive rows.
    Within a step, the longest row left goes to the replica with the fewest tokens. With ``prompts``, whole groups are
    also dealt in this way, to a replica with room for the group, and the deal whose fullest replica has fewer tokens
    is taken. So long responses to short prompts are dealt row by row.

    Args:
        lengths: number of tokens in each row, prompt and response.
        prompts: each row's prompt, if a replica computes it once for all rows that share it.
    """
    chunks = np.array_split(np.arange(len(lengths)), replicas)
    steps = count_steps(len(lengths), order.batch_size)
    shuffled = [np.random.default_rng(order.seed).permutation(len(chunk)) for chunk in chunks]
    dealt = [chunk.copy() for chunk in chunks]

    def tokens_of(rows: list[int]) -> int:
        return computed_tokens(lengths, prompts, rows)

    # One step at a time: its places in each replica's buffer, and its rows.
    for places in zip(*(np.array_split(permuted, steps) for permuted in shuffled), strict=True):
        rows = np.concatenate([chunk[place] for chunk, place in zip(chunks, places, strict=True)]).tolist()
        room = [len(place) for place in places]
        ways = [[[row] for row in rows]]
        if prompts is not None:
            groups: dict[Prompt, list[int]] = {}
            for row in rows:
                groups.setdefault(prompts[row], []).append(row)
            ways.insert(0, list(groups.values()))
        deals = [_deal(way, room, tokens_of) for way in ways]
        best = min(deals, key=lambda deal: max(map(tokens_of, deal)))
        for of_replica, place, mine in zip(dealt, places, best, strict=True):
            of_replica[place[::-1]] = mine
    return dealt


def _deal(groups: list[list[int]], room: list[int], tokens_of: Callable[[list[int]], int]) -> list[list[int]]:
    """Fill each replica's ``room`` with rows. Groups with most tokens come first, and stay whole where they fit."""
    dealt: list[list[int]] = [[] for _ in room]
    tokens = [0] * len(room)
    for group in sorted(groups, key=lambda group: -tokens_of(group)):
        while group:
            free = [most - len(rows) for most, rows in zip(room, dealt, strict=True)]
            fits = [replica for replica, left in enumerate(free) if left >= len(group)]
            to = min(fits or [free.index(max(free))], key=lambda replica: tokens[replica])
            part, group = group[: free[to]], group[free[to] :]
            dealt[to] += part
            tokens[to] += tokens_of(part)
    return dealt


def count_actions(masks: Iterable[Tensor], group: ProcessGroup, device: torch.device, dp_size: int = 1) -> StepTotals:
    """Count an optimizer step's action tokens, and its rows with any, over all replicas; each at least 1.

    Args:
        masks: the action mask (A,) of each of this replica's rows.
        group: the replicas' group; the call is collective over it.
        dp_size: see ``StepTotals``.
    """
    tokens = [int(mask.sum()) for mask in masks]
    counts = torch.tensor([float(sum(tokens)), float(np.count_nonzero(tokens))], device=device)
    all_reduce(counts, group=group)
    num_tokens, num_rows = counts.clamp_min(1)
    return StepTotals(num_tokens, num_rows, dp_size)


class StepMetrics:
    """A training phase's metrics under OpenRLHF's names, added over micro-batches and in :meth:`averages` over
    replicas.

    A micro-batch's loss is a part of its step's loss: parts are summed, and steps averaged. (OpenRLHF averages the
    parts over tokens, as if each were a mean.) Any other scalar is a mean over action tokens; other tensors have one
    value per row. Metrics that compare the policy with the old policy or with its engines cover its own rows; a
    guide's rows have 0.

    Args:
        args: the run's arguments, which decide what ``kl`` and ``is_filter_ratio`` are.
        replicas: divisor of the parts: the number of replicas if their gradients are averaged, 1 if summed.
    """

    def __init__(self, args: Arguments, replicas: int = 1) -> None:
        self._parts = {"policy_loss", "entropy_loss", "critic_loss"} | ({"kl"} if args.algo.kl.use_loss else set())
        self._of_rows = {"is_filter_ratio"} if args.algo.advantage.is_correction_level == "seq" else set()
        self._replicas = replicas
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self.not_finite: set[str] = set()  # names of metrics that were not, since ``BadSteps`` last looked

    def add(self, values: Mapping[str, Tensor], experience: Experience) -> None:
        """Add one micro-batch's metrics, scalars or (rows,) each."""
        mask, off_policy = experience.action_mask, off_policy_rows(experience)
        on_policy = mask if off_policy is None else mask[~off_policy.to(mask.device)]
        tokens, rows = float(mask.sum()), len(mask)
        for kind, weight in (
            ("token", tokens),
            ("row", rows),
            ("own token", float(on_policy.sum())),
            ("own row", len(on_policy)),
        ):
            self._weights[kind] += weight
        for name, value in values.items():
            whose = "own " if name in _OF_OWN_ROWS else ""
            mean = float(value.float().mean())
            if not math.isfinite(mean) and (tokens or value.dim() > 0):
                self.not_finite.add(name)
            if name in self._parts:
                self._sums[name, "step"] += mean / self._replicas
            elif value.dim() > 0 or name in self._of_rows:
                self._sums[name, whose + "row"] += mean * rows
            elif tokens:  # a mean over no tokens is NaN
                self._sums[name, whose + "token"] += mean * tokens

    def add_tokens(self, computed: int, of_rows: int) -> None:
        """Add one micro-batch's number of computed tokens, and its rows' number of tokens."""
        self._sums[names.TOKENS_COMPUTED, "phase"] += computed
        self._sums[names.TOKENS_ROWS, "phase"] += of_rows

    def averages(self, steps: int, reports: bool) -> dict[str, float]:
        """Average over ``steps`` optimizer steps and all ranks that set ``reports``, one per replica; also return the
        phase's numbers of tokens. Collective."""
        gathered = all_gather_objects((dict(self._sums), self._weights) if reports else None)
        sums: dict[tuple[str, str], float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float, step=float(steps))
        for rank in filter(None, gathered):
            for key, value in rank[0].items():
                sums[key] += value
            for kind, value in rank[1].items():
                weights[kind] += value
        return {name: value / max(weights[kind], 1.0) for (name, kind), value in sums.items()}


def row_metrics(experience: Experience) -> dict[str, Tensor]:
    """Return the values that OpenRLHF logs for each row: tensors and lists of ``info``, and the per-episode fields."""
    values: dict[str, Tensor] = {}
    for name, value in experience.info.items():
        if isinstance(value, list):
            values[name] = torch.tensor([float(number) for number in value])
        elif isinstance(value, Tensor):
            values[name] = value
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if field.name in {"rewards", "scores"} or not Experience.is_episode_tensor_field(field.name):
            continue
        if isinstance(value, Tensor) and field.name not in values:
            values[field.name] = value
    return values


class BadSteps:
    """The count of a model's ("actor" or "critic") optimizer steps with a non-finite gradient, which stops training
    after ``--train.max_bad_steps`` in a row.

    Every rank skips such a step: weights, moments, learning rate schedule and step count stay the same. fp16 has no
    limit, because DeepSpeed's loss scaling works by skipping steps.
    """

    def __init__(self, model: str, args: Arguments) -> None:
        self._model = model
        self._limit = math.inf if args.ds.param_dtype == "fp16" else args.train.max_bad_steps
        self._in_a_row = 0

    def add(self, norm: float, steps: int, metrics: StepMetrics) -> bool:
        """Return True if the gradient ``norm`` of the step after ``steps`` good ones is not finite. ``metrics`` names
        what else was not. Collective in that case.

        Raises:
            TrainingStopped: it is one bad step too many.
        """
        not_finite, metrics.not_finite = metrics.not_finite, set()
        if math.isfinite(norm):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        bad = ", ".join(["the gradient", *sorted(set().union(*all_gather_objects(not_finite)))])
        sentence = f"Skipped the {self._model}'s optimizer step after {steps} good ones: {bad} was not finite"
        if self._in_a_row >= self._limit:
            raise TrainingStopped(
                f"{sentence}, the last of {self._in_a_row} in a row (--train.max_bad_steps). No weight has changed. "
                f"Try --ckpt.load_enable with a smaller --{self._model}.adam.lr to resume from the last checkpoint."
            )
        print(f"Warning: {sentence}.", flush=True)
        return True

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise TrainingStopped if one of this rank's named ``weights`` is not finite."""
        largest = {name: torch.linalg.vector_norm(weight, math.inf) for name, weight in weights if weight.numel()}
        finite = torch.stack(list(largest.values())).isfinite().tolist()
        if not all(finite):
            raise TrainingStopped(
                f"The {self._model}'s weight {list(largest)[finite.index(False)]} is not finite after training. No "
                "checkpoint has it; rerun with --ckpt.load_enable to resume from the last one."
            )


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass on DeepSpeed."""

    experience: Experience  # on the GPU
    rows: int  # number of its rows that count: all, or none
    row_share: float  # its fraction of the step's rows, times the replicas: the factor of a mean over these rows
    last: bool  # whether it ends an optimizer step
    totals: StepTotals
    tokens: tuple[int, int]  # numbers of computed tokens, and of its rows' tokens


class WholeSteps:
    """Mixin for OpenRLHF's trainers on DeepSpeed that tells the engine which backward pass ends an optimizer step.

    Left alone, DeepSpeed counts. With dynamic batches OpenRLHF tells it 1 micro-batch per step, and ZeRO 1 and 2 then
    keep only the last gradient. With fixed batches a short rollout shifts the count for the rest of the run. Both
    were seen in OpenRLHF 0.11.2 with DeepSpeed 0.19.6; can go once OpenRLHF tells DeepSpeed not to count
    (``managed_gradient_accumulation``, https://github.com/deepspeedai/DeepSpeed/issues/8183).
    """

    args: Arguments
    strategy: Any
    replay_buffer: Any

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)  # type: ignore[call-arg]
        self._trained = "critic" if hasattr(self, "critic") else "actor"
        self.args = strategy.arguments  # upstream's own may be written to
        self._bad_steps = BadSteps(self._trained, self.args)

    @property
    def _deepspeed_engine(self) -> Any:
        """The engine of the trained model."""
        return self.critic if self._trained == "critic" else self.actor.model  # type: ignore[attr-defined]

    def train(self, step: Callable[[MicroBatch], Mapping[str, Tensor]]) -> dict[str, float]:
        """Train on the whole replay buffer. ``step`` runs a micro-batch's forward and backward pass, and after the
        last micro-batch of an optimizer step the step itself.

        Returns:
            metrics over all replicas (see ``StepMetrics``); for learning rate and gradient norm, the last value.
        """
        engine, mesh = self._deepspeed_engine, self.strategy.ds_device_mesh
        metrics = StepMetrics(self.args, mesh["dp"].size())
        last: dict[str, float] = {}
        steps = bad = 0
        for batch in self.micro_batches():
            values = step(batch)
            if batch.rows:
                metrics.add(values, batch.experience)
                metrics.add_tokens(*batch.tokens)
            if batch.last:
                # After an overflow DeepSpeed still returns the previous step's norm.
                norm = math.nan if engine.optimizer.overflow else self.strategy.get_grad_norm(engine)
                last = {"_lr": engine.lr_scheduler.get_last_lr()[0], "_grad_norm": norm}
                steps += 1
                bad += self._bad_steps.add(norm, engine.global_steps - engine.skipped_steps, metrics)
        self._bad_steps.check_weights((name, _own_part(p)) for name, p in engine.module.named_parameters())
        last["_bad_steps"] = bad
        reports = mesh["sp"].get_local_rank() == 0 and mesh["tp"].get_local_rank() == 0  # one rank of each replica
        return metrics.averages(steps, reports) | {self._trained + name: value for name, value in last.items()}

    def row_order(self) -> RowOrder | None:
        """Return the next training phase's order of rows: the same on all ranks of a replica, and after a resume. None
        keeps the given order: dynamic batches without shared prompts are already sorted for balance."""
        engine, train = self._deepspeed_engine, self.args.train
        if train.dynamic_batch_enable and not train.shares_prompts:
            return None
        seed = [train.seed, engine.global_steps - engine.skipped_steps]
        return RowOrder(train.batch_size, seed, train.shares_prompts)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield a training phase's micro-batches, one for each backward pass, and tell the engine which ends a
        step."""
        engine = self._deepspeed_engine
        assert (
            engine.gradient_accumulation_steps() == 1
        ), "DeepSpeed must not divide losses, which are divided already; see Strategy"
        args, items = self.args, self.replay_buffer.items
        group = self.strategy.ds_device_mesh["dp"].get_group()
        device = torch.device(torch.cuda.current_device())
        order = self.row_order()
        shuffle = None if order is None else np.random.default_rng(order.seed)
        for rows in optimizer_steps(len(items), args, group, device, shuffle):
            # Every replica makes as many backward passes as the one with most, the last of them without rows.
            parts = self._split([items[row] for row in rows])
            totals = count_actions([items[row].action_mask for row in rows], group, device, group.size())
            num_rows = float(totals.global_batch_size)
            most = torch.tensor(len(parts), device=device)
            all_reduce(most, op=ReduceOp.MAX, group=group)
            parts += [[]] * (int(most) - len(parts))
            # Each with its part of the step's rows, and its numbers of tokens.
            for place, part in enumerate(parts):
                last = place + 1 == len(parts)
                engine.set_gradient_accumulation_boundary(last)
                batch = make_experience_batch(part, args.ds.packing_samples) if part else _no_actions()
                share = len(part) * group.size() / num_rows
                lengths = [int(item.total_length) for item in part]
                computed = len(part) * max(lengths, default=0)  # padded to the longest
                if args.ds.packing_samples:
                    computed = computed_tokens(lengths, prompts_of(part) if args.train.shares_prompts else None)
                tokens = computed, sum(lengths)
                yield MicroBatch(batch.to_device(device), len(part), share, last, totals, tokens)

    def _split(self, items: list[Experience]) -> list[list[Experience]]:
        """Split into micro-batches by tokens with dynamic batches, otherwise by rows. With shared prompts, that
        number of rows becomes a limit on computed tokens: what the rows would have, padded to the longest."""
        args = self.args
        dynamic, size, shared = args.train.dynamic_batch_enable, args.train.micro_batch_size, args.train.shares_prompts
        if not dynamic and not shared:
            return [items[i : i + size] for i in range(0, len(items), size)]
        lengths = [int(item.total_length) for item in items]
        budget = args.train.max_tokens_per_gpu * args.ds.ring_attn_size * args.ds.tensor_parallel_size
        if not dynamic:
            budget = size * max(lengths, default=0)
        prompts = prompts_of(items) if shared else None
        return [[items[i] for i in part] for part in fill_micro_batches(lengths, budget, prompts)]


def _own_part(parameter: Any) -> Tensor:
    """This rank's part of a parameter: with ZeRO 3 its partition, without the padding at the end, which DeepSpeed
    leaves uninitialized (0.19.6, runtime/zero/partition_parameters.py, _partition_param)."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.data
    partition = parameter.ds_tensor
    return partition[: max(0, parameter.ds_numel - parameter.ds_zero_partition_rank * partition.numel())]


def _no_actions() -> Experience:
    """A row of two tokens that no loss counts."""
    nothing = {name: torch.zeros(1, 1) for name in ("action_log_probs", "base_action_log_probs", "rollout_log_probs")}
    nothing |= {name: torch.zeros(1, 1) for name in ("values", "returns", "advantages")}
    tokens = torch.zeros(1, 2, dtype=torch.long)
    mask = torch.zeros(1, 1, dtype=torch.long)
    info = {name: torch.zeros(1) for name in (names.GROUPS_CORRECT, names.GROUPS_ACCURACY)}
    return Experience(sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=mask, info=info, **nothing)
