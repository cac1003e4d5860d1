"""Rollouts on disk: groups of a step, written by a thread while the step trains (``--logger.dump_rollouts``)."""

import dataclasses
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo import __version__
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import FOLDER, dump_file, vocabulary_digest, write_dump
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.features.dumps.ratios import take_ratios
from openrlhf_gtpo.training.rows import Rollout

_LONGEST_CHARACTER = 4  # tokens: the most bytes that a character has in UTF-8

Ratios = Mapping[int, tuple[np.ndarray, np.ndarray]]  # from ``TokenRatios``, by row


class RolloutDumper(ControllerFeature):
    """Writes the rollouts of every ``--logger.dump_rollouts``-th step: whole groups, at most ``--logger.dump_rows``
    rows.

    It does not use the run's random generators. A dump that fails, or is skipped because the last one is still being
    written, only causes a warning. A step whose training fails is dumped too, without ratios.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__(args)
        self._credit = entropy_credit(args)
        self._folder = Path(args.ckpt.path) / FOLDER
        self._thread: threading.Thread | None = None
        self._ratios: SimpleQueue[Ratios] = SimpleQueue()  # of the step in the current dump

    def begin(self, run: Any) -> None:
        self._run, self._tokenizer, self._max_steps = run, run.tokenizer, run.max_steps

    def on_batch(self, batch: RolloutBatch, experiences: Sequence[Experience]) -> None:
        """Start writing a step once it has advantages. Its tensors must not change. Training takes the ``experiences``
        apart meanwhile, so the thread gets shallow copies. Instead of labels, which only rewards need, training gets
        the numbers of the rows whose ratios the dump needs."""
        step, args = self._run.step + 1, self.args  # the step's number in the log
        late = self._thread is not None and self._thread.is_alive()
        groups: set[int] = set()
        if step % args.logger.dump_rollouts == 0 and late:
            print(
                f"Warning: skipped the rollout dump of step {step}, because the last one is still being written.",
                flush=True,
            )
        elif step % args.logger.dump_rollouts == 0:
            total = int(batch.group_ids.max()) + 1
            count = min(total, max(1, args.logger.dump_rows // args.rollout.n_samples_per_prompt))
            groups = set(random.Random(f"{args.train.seed} {step}").sample(range(total), count))
            self._ratios = SimpleQueue()
            copies = list(map(copy, experiences))
            self._thread = threading.Thread(
                target=self._write,
                args=(step, self._run.rollout, batch, copies, groups, self._ratios),
                name="rollout-dump",
            )
            self._thread.start()
        if step <= args.critic.freezing_steps + 1:  # the actor trains on these rows later, with other steps' rows
            groups = set()
        for experience in experiences:
            experience.labels = [row if int(batch.group_ids[row]) in groups else None for row in experience.index]

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Complete this step's dump, if there is one, with the ratios from each rank's loss."""
        if step % self.args.logger.dump_rollouts == 0:
            ranks = self._run.models.actor._actor_handlers
            taken = ray.get([rank.__ray_call__.remote(take_ratios) for rank in ranks])
            self._ratios.put({row: seen for ratios in taken for row, seen in ratios.items()})

    def end(self) -> None:
        """Wait until the current dump is written; a step whose training has not ended gets no ratios."""
        if self._thread:
            self._ratios.put({})
            self._thread.join()

    def _write(
        self,
        step: int,
        rollout: Rollout,
        batch: RolloutBatch,
        experiences: list[Experience],
        groups: set[int],
        ratios: SimpleQueue[Ratios],
    ) -> None:
        path = dump_file(self._folder, step)
        try:
            rows = sorted(self._rows(batch, experiences, groups), key=lambda row: row["row"])
            columns = {name: None if rows[0][name] is None else [row[name] for row in rows] for name in rows[0]}
            seen = ratios.get()  # once the step is trained
            for part, name in enumerate(("ratio", "clipped")):
                columns[name] = [seen[row["row"]][part][_of_response(row)] for row in rows] if seen else None
            write_dump(path, self._settings(step, rollout, batch), columns)
        except Exception as error:  # a full disk or a tokenizer that cannot decode must not end the run
            print(f"Warning: could not dump the rollouts of step {step} to {path}: {error}", flush=True)

    def _settings(self, step: int, rollout: Rollout, batch: RolloutBatch) -> dict[str, Any]:
        args = self.args
        return {
            "openrlhf_gtpo": __version__,
            "step": step,
            "policy_version": rollout.version,  # training steps of the sampling policy
            "model": str(args.actor.model_name_or_path),
            "seed": args.train.seed,
            "temperature": args.rollout.temperature,
            "entropy": args.rollout.entropy,  # source of log-probs and entropies, unless an audit has closed the gate
            "estimator": args.algo.advantage.estimator,
            "config": None if self._credit is None else dataclasses.asdict(self._credit.config),
            "kl_coefficient": args.algo.kl.init_coef,
            "batch_rows": len(batch.order),
            "max_steps": self._max_steps,
            "vocabulary": self._vocabulary,
            "outcome_dtype": str(batch.outcome.dtype).removeprefix("torch."),
            **rollout.notes,
        }

    def _rows(
        self, batch: RolloutBatch, experiences: Sequence[Experience], groups: set[int]
    ) -> Iterator[dict[str, Any]]:
        # Each row of these groups: its own columns of the batch's tensors, from the last prompt token on.
        decode = lru_cache(maxsize=2**16)(
            partial(self._tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        for experience in experiences:
            for i, row in enumerate(experience.index):
                group = int(batch.group_ids[row])
                if group not in groups:
                    continue
                length = int(experience.attention_mask[i].sum())
                tokens = experience.sequences[i, :length].tolist()  # upstream pads on the right
                mask = experience.action_mask[i, : length - 1].bool()
                first = int(mask.int().argmax()) if mask.any() else len(mask)
                columns = slice(first, length - 1)  # of tensors that have the action mask's columns
                outcome = batch.outcome[row].double()
                yield {
                    "row": row,
                    "group": group,
                    "prompt": batch.prompts[row],
                    "outcome": float(outcome),
                    "length_penalty": float(experience.rewards[i].double() - outcome),
                    "truncated": bool(experience.truncated[i]),
                    "guided": bool(batch.off_policy[row]) if names.GUIDE_ROWS in experience.info else None,
                    "prompt_tokens": tokens[: first + 1],
                    "tokens": tokens[first + 1 :],
                    "pieces": list(pieces(tokens[first + 1 :], decode)),
                    "mask": mask[columns].numpy(),
                    "log_probs": (
                        _floats(experience.action_log_probs, i, columns)
                        if batch.values is None
                        else _floats(batch.values.log_probs, row, columns)
                    ),
                    "rollout_log_probs": _floats(experience.rollout_log_probs, i, columns),
                    "entropy": None if batch.values is None else _floats(batch.values.entropy, row, columns),
                    "advantages": _floats(experience.advantages, i, columns),
                    "versions": None if batch.versions is None else batch.versions[row, columns].int().numpy(),
                    "texts": json.dumps(_label(batch.labels[row]) | batch.texts[row], ensure_ascii=False),
                }

    @cached_property
    def _vocabulary(self) -> str:
        return vocabulary_digest(self._tokenizer)


def _of_response(row: Mapping[str, Any]) -> slice:
    """Return the columns of an action mask that belong to a dumped row's ``tokens``."""
    first = len(row["prompt_tokens"]) - 1
    return slice(first, first + len(row["tokens"]))


def _floats(values: torch.Tensor | None, row: int, columns: slice) -> Any:
    return None if values is None else values[row, columns].float().numpy()


def _label(label: Any) -> dict[str, str]:
    text = label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
    return {} if label is None else {"label": text}


def pieces(tokens: Sequence[int], decode: Callable[[tuple[int, ...]], str]) -> Iterator[str]:
    """Yield the text that each token adds; if several tokens make a character, the last one has all of it.

    Each token is decoded with its predecessors, because a tokenizer may drop the leading space of a first token and
    writes U+FFFD for part of a character.
    """
    begin, complete, said = 0, 0, ""  # said: the text of tokens[begin:complete], with which the next text begins
    for end in range(1, len(tokens) + 1):
        text = decode(tuple(tokens[begin:end]))
        if text.endswith("\ufffd") and end < len(tokens) and end - complete < _LONGEST_CHARACTER:
            yield ""
        else:
            yield text[len(said) :]
            begin, complete = complete, end
            said = decode(tuple(tokens[begin:complete]))
