"""Rollouts made by hand, and models that answer from a table, so that an experience maker runs without Ray."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_utils import experience_maker as upstream
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training import host
from openrlhf_gtpo.training.credit import experiences
from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker, Models
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.rows import Row
from openrlhf_gtpo.training.settings import upstream_parser
from openrlhf_gtpo.training.settings.frozen import changed, freeze, thaw

PAD = 0


def arguments(*argv: str, samples: int = 4) -> SimpleNamespace:
    """The arguments of a run with ``samples`` per prompt on one trainer process."""
    base = ["--reward.remote_url", "r.py", "--vllm.num_engines", "1", "--actor.num_gpus_per_node", "1"]
    base += ["--rollout.n_samples_per_prompt", str(samples), "--rollout.micro_batch_size", "3"]
    args = upstream_parser.parse([*base, *argv])
    for section, name in ((args.eval, "steps"), (args.ckpt, "save_steps")):
        if getattr(section, name) == -1:  # as ``parse`` has it
            setattr(section, name, math.inf)
    return args


def adapted(args: SimpleNamespace) -> SimpleNamespace:
    """The arguments as a CPU host has them."""
    frozen = freeze(args)
    return thaw(changed(frozen, host.without_cuda(frozen)))


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

    def rows(self) -> list[Row]:
        """The rows, as the sampler gives them. Token 1 + i stands at the start of row i."""
        rows = []
        for i, keep in enumerate(self.mask):
            width = int(keep.nonzero()[-1]) + 1
            tokens = np.full(width + 1, 7)
            tokens[0] = 1 + i
            rows.append(
                Row(
                    prompt=f"prompt {int(self.group_ids[i])}",
                    label="label",
                    number=int(self.group_ids[i]),
                    tokens=tokens,
                    mask=np.append(False, keep[:width].numpy()),
                    log_probs=np.append(np.float32(0), self.log_probs[i, :width].numpy()),
                    reward=self.outcome[i].item(),
                    score=self.outcome[i].item(),
                    truncated=bool(self.truncated[i]),
                )
            )
        return rows

    def samples(self) -> list[Experience]:
        """The rows as upstream's generator makes them."""
        return [row.experience(max_len=100) for row in self.rows()]


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
    kind: type,
    args: SimpleNamespace,
    batch: Rollout,
    monkeypatch: pytest.MonkeyPatch,
    kl_coef: float = 0.0,
    features: Sequence[ControllerFeature] = (),
) -> Any:
    """An experience maker of ``kind`` whose models know ``batch``. Ray's references are the objects themselves."""
    values = SimpleNamespace(put=lambda value: value, get=lambda value: value)
    for module in (upstream, experiences):
        monkeypatch.setattr(module, "ray", values)
    processes = args.actor.num_nodes * args.actor.num_gpus_per_node
    duplicates = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    ranks = processes // duplicates
    ours = kind is ExperienceMaker
    if ours and captures_entropy(args):
        policy = TableModel(ranks, duplicates, batch.log_probs, batch.entropy, result=TokenValues)
    else:
        policy = TableModel(ranks, duplicates, batch.log_probs)
    critic = TableModel(ranks, duplicates, batch.values) if args.algo.advantage.estimator == "gae" else None
    reference = TableModel(ranks, duplicates, batch.reference) if kl_coef else None
    tokenizer, kl_control = SimpleNamespace(pad_token_id=PAD), SimpleNamespace(value=kl_coef)
    strategy = SimpleNamespace(args=args, arguments=args)
    if ours:
        return ExperienceMaker(strategy, Models(policy, critic, None, reference), kl_control, tokenizer, features)
    return kind(policy, critic, None, reference, kl_control, strategy, tokenizer)


def make(made: Any, batch: Rollout) -> list[Experience]:
    """The experiences that a maker of this package, or upstream's, makes of ``batch``."""
    return (
        made.make(batch.rows()) if isinstance(made, ExperienceMaker) else made.make_experience_batch(batch.samples())
    )


def in_sampling_order(made: Sequence[Experience], name: str, width: int) -> torch.Tensor:
    """(B, width) or (B,) values of a field of the experiences."""
    pieces: dict[int, torch.Tensor] = {}
    for experience in made:
        for row, value in zip(experience.index, getattr(experience, name), strict=True):
            pieces[row] = torch.nn.functional.pad(value, (0, width - len(value))) if value.dim() else value
    assert sorted(pieces) == list(range(len(pieces)))
    return torch.stack([pieces[row] for row in range(len(pieces))])
