"""From a replay buffer to whole optimizer steps: which rows go to which replica and micro-batch, and which micro-batch
is the last; metrics that do not depend on how rows were split; and numbers that must not get into the weights.

A rollout may be short (end of the data, dynamic filtering) and its rows dealt unevenly. Every replica still makes the
same number of optimizer steps, and on DeepSpeed of backward passes: a replica without a row keeps in step with the
others.
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
    """This replica's rows in each optimizer step of a training phase: all of them, ``--train.max_epochs`` times.

    Args:
        num_rows: number of rows that this replica holds.
        group: the replicas' group; the call is collective over it.
        shuffle: draws the rows of each step, and in each further epoch only the order of the steps, which thus remain
            as balanced as they were dealt; the same on every replica. None keeps rows and steps in their own order.
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
    """How replicas go through their rows: in optimizer steps of ``batch_size`` rows over all replicas, shuffled by a
    generator seeded with ``seed``; ``shares_prompts`` if rows of a micro-batch have their prompt computed once."""

    batch_size: int
    seed: list[int]
    shares_prompts: bool = False


def deal_rows(
    lengths: Sequence[int], replicas: int, order: RowOrder, prompts: Sequence[Prompt] | None = None
) -> list[np.ndarray]:
    """The rows that each replica gets, in the order of its replay buffer, with about the same number of tokens on each
    replica in every optimizer step.

    Each step has the same rows over all replicas, and each replica the same number of them, as with equal chunks of
    consecutive rows. Within a step, the longest row left goes to the replica with the fewest tokens; or the rows left
    that share a prompt and have most tokens, to that with the fewest that has room for all of them, if the replica
    with most tokens then has fewer. Long responses to short prompts are dealt row by row.

    Args:
        lengths: number of tokens in each row, prompt and response.
        prompts: each row's, if it is computed once for the rows of a replica that share it.
    """
    chunks = np.array_split(np.arange(len(lengths)), replicas)
    steps = count_steps(len(lengths), order.batch_size)
    shuffled = [np.random.default_rng(order.seed).permutation(len(chunk)) for chunk in chunks]
    dealt = [chunk.copy() for chunk in chunks]

    def tokens_of(rows: list[int]) -> int:
        return computed_tokens(lengths, prompts, rows)

    for places in zip(
        *(np.array_split(permuted, steps) for permuted in shuffled), strict=True
    ):  # one step's, by replica
        rows = np.concatenate([chunk[place] for chunk, place in zip(chunks, places, strict=True)]).tolist()
        room = [len(place) for place in places]
        ways = [[[row] for row in rows]]
        if prompts is not None:
            groups: dict[Prompt, list[int]] = {}
            for row in rows:
                groups.setdefault(prompts[row], []).append(row)
            ways.insert(0, list(groups.values()))
        shares = [_share_out(way, room, tokens_of) for way in ways]
        best = min(shares, key=lambda share: max(map(tokens_of, share)))
        for of_replica, place, mine in zip(dealt, places, best, strict=True):
            of_replica[place[::-1]] = mine
    return dealt


def _share_out(groups: list[list[int]], room: list[int], tokens_of: Callable[[list[int]], int]) -> list[list[int]]:
    """Each replica's rows, as many as it has room for: groups go whole to one where they fit, those with most tokens
    first."""
    shares: list[list[int]] = [[] for _ in room]
    tokens = [0] * len(room)
    for group in sorted(groups, key=lambda group: -tokens_of(group)):
        while group:
            free = [most - len(share) for most, share in zip(room, shares, strict=True)]
            fits = [replica for replica, left in enumerate(free) if left >= len(group)]
            to = min(fits or [free.index(max(free))], key=lambda replica: tokens[replica])
            part, group = group[: free[to]], group[free[to] :]
            shares[to] += part
            tokens[to] += tokens_of(part)
    return shares


def count_actions(masks: Iterable[Tensor], group: ProcessGroup, device: torch.device, dp_size: int = 1) -> StepTotals:
    """An optimizer step's action tokens, and its rows that have any, over all replicas; each at least 1.

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
    """A training phase's metrics by OpenRLHF's names: sums over micro-batches, and in :meth:`averages` over replicas.

    A loss is a part of its optimizer step's: parts are summed and averaged over steps. Any other scalar is a mean over
    action tokens; anything else has one value per row. (OpenRLHF averages parts over tokens, as if each were a mean.)
    Metrics that compare the policy with the old one or with its engines cover its own rows, and are 0 at a guide's.

    Args:
        args: the run's arguments, which decide what ``kl`` and ``is_filter_ratio`` are.
        replicas: what parts are divided by: the number of replicas if their gradients are averaged, 1 if summed.
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
        """Add the tokens of one micro-batch: those that were computed, and those of its rows."""
        self._sums[names.TOKENS_COMPUTED, "phase"] += computed
        self._sums[names.TOKENS_ROWS, "phase"] += of_rows

    def averages(self, steps: int, reports: bool) -> dict[str, float]:
        """Averages over ``steps`` optimizer steps and all ranks that set ``reports``, one per replica, and the number
        of tokens of the phase. Collective."""
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
    """The values that OpenRLHF logs for each row: tensors and lists of ``info``, and the per-episode fields."""
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
    """Counts a model's ("actor" or "critic") optimizer steps whose gradient was not finite, and stops training after
    ``--train.max_bad_steps`` in a row. Such a step is skipped: weights, moments, learning rate schedule and step count
    stay the same, on every rank. No limit with fp16, since DeepSpeed's loss scaling works by skipping steps."""

    def __init__(self, model: str, args: Arguments) -> None:
        self._model = model
        self._limit = math.inf if args.ds.param_dtype == "fp16" else args.train.max_bad_steps
        self._in_a_row = 0

    def add(self, norm: float, steps: int, metrics: StepMetrics) -> bool:
        """Return True if the step after ``steps`` good ones was bad, by its gradient ``norm``; ``metrics`` says what
        else was not finite. Collective over all ranks if it was. Raises TrainingStopped if it is one too many."""
        not_finite, metrics.not_finite = metrics.not_finite, set()
        if math.isfinite(norm):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        bad = ", ".join(["the gradient", *sorted(set().union(*all_gather_objects(not_finite)))])
        sentence = f"The {self._model}'s optimizer step after its {steps} good ones was skipped: {bad} was not finite"
        if self._in_a_row >= self._limit:
            raise TrainingStopped(
                f"{sentence}, the last of {self._in_a_row} in a row (--train.max_bad_steps). No weight has changed; "
                f"with a smaller --{self._model}.adam.lr, --ckpt.load_enable may get further from the last checkpoint."
            )
        print(f"Warning: {sentence}.", flush=True)
        return True

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise TrainingStopped if one of this rank's ``weights``, each with its name, is not finite."""
        largest = {name: torch.linalg.vector_norm(weight, math.inf) for name, weight in weights if weight.numel()}
        finite = torch.stack(list(largest.values())).isfinite().tolist()
        if not all(finite):
            raise TrainingStopped(
                f"The {self._model}'s weight {list(largest)[finite.index(False)]} is not finite after training. No "
                "checkpoint has it; the same command with --ckpt.load_enable goes on from the last one."
            )


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass on DeepSpeed."""

    experience: Experience  # on the GPU
    rows: int  # how many of its rows count: all, or none
    row_share: float  # of the step's rows, times the number of replicas: what a mean over these rows is multiplied by
    last: bool  # whether an optimizer step ends with it
    totals: StepTotals
    tokens: tuple[int, int]  # that are computed, and that its rows have


class WholeSteps:
    """Mixin for OpenRLHF's trainers on DeepSpeed that tells the engine which backward pass ends an optimizer step.

    Left to itself, DeepSpeed counts: with dynamic batches OpenRLHF tells it 1 micro-batch per step, and ZeRO 1 and 2
    then keep only the last one's gradient; with fixed ones a short rollout shifts the count for the rest of the run.
    Both were seen in OpenRLHF 0.11.2 with DeepSpeed 0.19.6; can go once OpenRLHF tells DeepSpeed not to count
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
        """The one around the model that is trained."""
        return self.critic if self._trained == "critic" else self.actor.model  # type: ignore[attr-defined]

    def train(self, step: Callable[[MicroBatch], Mapping[str, Tensor]]) -> dict[str, float]:
        """Train on the whole replay buffer; ``step`` runs a micro-batch's forward and backward pass, and after the
        last of an optimizer step the step itself.

        Returns:
            its metrics over all replicas (see ``StepMetrics``); for learning rate and gradient norm, the last value.
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
                # If it overflows, DeepSpeed gives the norm of the step before.
                norm = math.nan if engine.optimizer.overflow else self.strategy.get_grad_norm(engine)
                last = {"_lr": engine.lr_scheduler.get_last_lr()[0], "_grad_norm": norm}
                steps += 1
                bad += self._bad_steps.add(norm, engine.global_steps - engine.skipped_steps, metrics)
        self._bad_steps.check_weights((name, _own_part(p)) for name, p in engine.module.named_parameters())
        last["_bad_steps"] = bad
        reports = mesh["sp"].get_local_rank() == 0 and mesh["tp"].get_local_rank() == 0  # one rank of each replica
        return metrics.averages(steps, reports) | {self._trained + name: value for name, value in last.items()}

    def row_order(self) -> RowOrder | None:
        """The order of rows in the next training phase: the same on every rank of a replica, and after a resume. None
        for the rows' own order, in which dynamic batches without shared prompts are already sorted for balance."""
        engine, train = self._deepspeed_engine, self.args.train
        if train.dynamic_batch_enable and not train.shares_prompts:
            return None
        seed = [train.seed, engine.global_steps - engine.skipped_steps]
        return RowOrder(train.batch_size, seed, train.shares_prompts)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro-batches of a training phase, one for each backward pass; the engine knows which is the last."""
        engine = self._deepspeed_engine
        assert (
            engine.gradient_accumulation_steps() == 1
        ), "DeepSpeed divides losses that are divided already; see Strategy"
        args, items = self.args, self.replay_buffer.items
        group = self.strategy.ds_device_mesh["dp"].get_group()
        device = torch.device(torch.cuda.current_device())
        order = self.row_order()
        shuffle = None if order is None else np.random.default_rng(order.seed)
        for rows in optimizer_steps(len(items), args, group, device, shuffle):
            parts = self._split([items[row] for row in rows])
            totals = count_actions([items[row].action_mask for row in rows], group, device, group.size())
            num_rows = float(totals.global_batch_size)
            most = torch.tensor(len(parts), device=device)
            all_reduce(most, op=ReduceOp.MAX, group=group)
            parts += [[]] * (int(most) - len(parts))
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
        """Split into micro-batches by number of tokens with dynamic batches, by number of rows otherwise. Where
        prompts are shared, as many tokens are computed at once as in that number of rows, padded to the longest."""
        args = self.args
        dynamic, size, shares = args.train.dynamic_batch_enable, args.train.micro_batch_size, args.train.shares_prompts
        if not dynamic and not shares:
            return [items[i : i + size] for i in range(0, len(items), size)]
        lengths = [int(item.total_length) for item in items]
        budget = args.train.max_tokens_per_gpu * args.ds.ring_attn_size * args.ds.tensor_parallel_size
        if not dynamic:
            budget = size * max(lengths, default=0)
        prompts = prompts_of(items) if shares else None
        return [[items[i] for i in part] for part in fill_micro_batches(lengths, budget, prompts)]


def _own_part(parameter: Any) -> Tensor:
    """What this rank has of a parameter: with ZeRO 3 its partition, without the padding at the end, which DeepSpeed
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
