"""Rollouts made by hand, and models that answer from a table, so that an experience maker runs without Ray."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils import experience_maker as upstream
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.experience_maker import EntropyExperienceMaker
from openrlhf_gtpo.training.settings import upstream_parser

PAD = 0


def arguments(*argv: str, samples: int = 4) -> SimpleNamespace:
    """The arguments of a run with ``samples`` per prompt on one trainer process."""
    base = ["--reward.remote_url", "r.py", "--vllm.num_engines", "1", "--actor.num_gpus_per_node", "1"]
    base += ["--rollout.n_samples_per_prompt", str(samples), "--rollout.micro_batch_size", "3"]
    return upstream_parser.parse([*base, *argv])


@dataclass
class Rollout:
    """B rows in sampling order; everything per token is (B, T) in the columns of upstream's action mask."""

    mask: torch.Tensor
    outcome: torch.Tensor
    group_ids: torch.Tensor
    entropy: torch.Tensor
    log_probs: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor
    truncated: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) upstream's ``response_length``: first to last action token."""
        columns = torch.arange(self.mask.shape[1]).expand_as(self.mask)
        last = columns.masked_fill(~self.mask, -1).amax(-1)
        first = columns.masked_fill(~self.mask, self.mask.shape[1]).amin(-1)
        return last - first + 1

    def samples(self) -> list[Experience]:
        """One experience per row, as upstream's generator makes them. Token 1 + i stands at the start of row i."""
        experiences = []
        for i, keep in enumerate(self.mask):
            width = int(keep.nonzero()[-1]) + 1
            sequence = torch.full((width + 1,), 7)
            sequence[0] = 1 + i
            reward = self.outcome[i : i + 1].clone()
            experiences.append(
                Experience(
                    sequences=sequence.unsqueeze(0),
                    attention_mask=torch.ones(1, width + 1, dtype=torch.long),
                    action_mask=keep[:width].long().unsqueeze(0),
                    rollout_log_probs=self.log_probs[i : i + 1, :width].clone(),
                    prompts=[f"prompt {int(self.group_ids[i])}"],
                    labels=["label"],
                    images=[None],
                    mm_train_inputs=[None],
                    rewards=reward,
                    scores=reward.clone(),
                    response_length=self.lengths[i : i + 1],
                    truncated=self.truncated[i : i + 1],
                    total_length=torch.tensor([float(width + 1)]),
                    info={"reward": reward.clone(), "response_clip_ratio": torch.tensor([False])},
                )
            )
        return experiences


def rollout(
    seed: int = 0, prompts: int = 5, samples: int = 4, longest: int = 9, binary: bool = True, holes: bool = True
) -> Rollout:
    """Ragged rows that start at different columns; with ``holes``, every third one has some (several turns)."""
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * samples
    width = 4 + longest

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    mask = torch.zeros(rows, width, dtype=torch.bool)
    for i in range(rows):
        start = int(uniform(1) * 4)
        length = 1 + int(uniform(1) * longest)
        mask[i, start : start + length] = True
        if holes and i % 3 == 0 and length > 3:
            mask[i, start + 1 : start + 3] = False
    outcome = (uniform(rows) < 0.5).float() if binary else uniform(rows)
    outcome[:samples] = 1.0  # one uniform group
    return Rollout(
        mask=mask,
        outcome=outcome,
        group_ids=torch.arange(rows) // samples,
        entropy=uniform(rows, width) * 3,
        log_probs=-uniform(rows, width) * 4,
        reference=-uniform(rows, width) * 4,
        values=uniform(rows, width),
        truncated=uniform(rows) < 0.3,
    )


class TableModel:
    """A Ray actor group of ``processes`` ranks that answers a forward from a table, by the rows' first tokens."""

    def __init__(
        self, processes: int, duplicates: int, *tables: torch.Tensor, result: Any = lambda table: table
    ) -> None:
        self.processes, self.duplicates, self.tables, self.result = processes, duplicates, tables, result

    def async_run_method_batch(
        self, method_name: str, sequences: Sequence[torch.Tensor], action_mask: Sequence[torch.Tensor], **rest: Any
    ) -> list[list[Any]]:
        assert method_name == "forward"
        answers = []
        for tokens, mask in zip(sequences, action_mask, strict=True):
            rows = [table[tokens[:, 0] - 1, : mask.shape[1]] for table in self.tables]
            # A model answers at every column; outside the mask the values are arbitrary, as at padding.
            answers.append(self.result(*rows))
        per_rank = -(-len(answers) // self.processes)
        chunks = [answers[i : i + per_rank] for i in range(0, len(answers), per_rank)]
        return [chunk for chunk in chunks for _ in range(self.duplicates)]


def maker(
    kind: type, args: SimpleNamespace, batch: Rollout, monkeypatch: pytest.MonkeyPatch, kl_coef: float = 0.0
) -> Any:
    """An experience maker of ``kind`` whose models know ``batch``. Ray's references are the objects themselves."""
    monkeypatch.setattr(upstream, "ray", SimpleNamespace(put=lambda value: value, get=lambda value: value))
    processes = args.actor.num_nodes * args.actor.num_gpus_per_node
    duplicates = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    ranks = processes // duplicates
    with_entropy = kind is EntropyExperienceMaker and (
        args.algo.advantage.estimator in ESTIMATORS or args.logger.entropy_enable
    )
    if with_entropy:
        policy = TableModel(ranks, duplicates, batch.log_probs, batch.entropy, result=TokenValues)
    else:
        policy = TableModel(ranks, duplicates, batch.log_probs)
    critic = TableModel(ranks, duplicates, batch.values) if args.algo.advantage.estimator == "gae" else None
    reference = TableModel(ranks, duplicates, batch.reference) if kl_coef else None
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    kl_ctl = SimpleNamespace(value=kl_coef)
    return kind(policy, critic, None, reference, kl_ctl, SimpleNamespace(args=args), tokenizer)


def in_sampling_order(experiences: Sequence[Experience], name: str, width: int) -> torch.Tensor:
    """(B, width) or (B,) values of a field of the experiences."""
    pieces: dict[int, torch.Tensor] = {}
    for experience in experiences:
        for row, value in zip(experience.index, getattr(experience, name), strict=True):
            pieces[row] = torch.nn.functional.pad(value, (0, width - len(value))) if value.dim() else value
    assert sorted(pieces) == list(range(len(pieces)))
    return torch.stack([pieces[row] for row in range(len(pieces))])
