"""A row, from the engine that samples it to the training step; and what an engine is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.errors import TrainingStopped, one_line
from openrlhf_gtpo.token_values import TokenValues

ROUTES = "routes"  # the name of a row's among what else the model takes of it


class Request(NamedTuple):
    """Responses to one prompt, as one engine is asked for them."""

    prompt: str
    label: Any  # the prompt's own
    images: Any
    number: int  # of the prompt, in the order in which prompts are drawn
    samples: int  # responses
    first: int = 0  # the place of the first of them in the prompt's group
    seed: tuple[int, ...] | None = None  # a response's seed is made of it; None: the engine's generator samples
    is_trained: bool = True  # whether the policy learns from the responses, as it does not in an evaluation
    engine: Any = None  # which is asked; None: the policy's engine that has least to do
    variables: Mapping[str, Any] | None = None  # what the chat template was given for the prompt, for an agent's turns


class Dropped(NamedTuple):
    """An engine's answer to a request whose reward or agent failed, in a run that may go on without the prompt."""

    reason: str


@dataclass
class Row:
    """One prompt with one response: n tokens, cut to ``--data.max_len``."""

    prompt: str
    label: Any
    number: int  # of the prompt (see ``Request``)
    tokens: np.ndarray  # (n,) int64, prompt and response
    mask: np.ndarray  # (n,) bool, True at action tokens
    log_probs: np.ndarray | None  # (n,) float32, those of the engine that sampled the row; 0 outside the mask
    reward: float | int | None  # None: a reward model gives it
    score: float | int | None
    truncated: bool = False
    logs: dict[str, Any] = field(default_factory=dict)  # the numbers among the reward's extra_logs
    texts: dict[str, str] = field(default_factory=dict)  # the texts among them, for dumps
    images: Any = None
    image_inputs: Any = None  # what upstream's image processor made of them
    reward_dtype: torch.dtype | None = None  # in which success is decided; None: torch's for the number
    values: TokenValues | None = None  # (n,) each, from the policy's sampler; NaN where it has none
    routes: np.ndarray | None = None  # (n, layers, k) experts of a ``TokenRow``, the policy's sampler's
    versions: np.ndarray | None = None  # (n,) int32, the steps of the weights that drew the actions; -1: not known
    off_policy: bool = False  # the row's ratio is to the engine's ``log_probs``, not to the old policy
    weight: float = 1.0  # of its advantages
    metrics: dict[str, float] = field(default_factory=dict)  # averaged over rows, and logged

    @classmethod
    def of_response(cls, response: dict[str, Any], number: int, max_len: int, vocab_size: int | None = None) -> "Row":
        """The row of a response, as OpenRLHF's executors and agents return it.

        Args:
            number: of the prompt.
            vocab_size: the model's, if the tokens are an agent's.

        Raises:
            TrainingStopped: an agent returned something that is not a response.
        """
        try:
            tokens, log_probs = response["observation_tokens"], response["rollout_log_probs"]
            mask: np.ndarray = np.zeros(len(tokens), dtype=bool)
            for start, end in response["action_ranges"]:
                mask[start:end] = True
            if log_probs is not None and len(log_probs) != len(tokens):  # as of an agent that does not ask for them
                raise ValueError(f"it has {len(log_probs)} rollout_log_probs for {len(tokens)} observation_tokens")
            if unknown := [token for token in tokens if vocab_size and not 0 <= token < vocab_size]:
                raise ValueError(f"token {unknown[0]} is not in the model's vocabulary of {vocab_size}")
            numbers = {name: _number(name, response.get(name)) for name in ("reward", "scores")}
            # Upstream ends an agent whose context is full, and counts it as cut off only if its last turn was.
            ends = [end for _, end in response["action_ranges"]]
            full = max_len <= len(tokens) > max(ends, default=0)
            logs = response.get("extra_logs", {})
            return cls(
                prompt=response["prompt"],
                label=response["label"],
                number=number,
                tokens=np.asarray(tokens, dtype=np.int64)[:max_len],
                mask=mask[:max_len],
                log_probs=None if log_probs is None else np.asarray(log_probs, dtype=np.float32)[:max_len],
                reward=numbers["reward"],
                score=numbers["scores"],
                truncated=bool(response.get("truncated", False)) or full,
                logs={name: _first(value) for name, value in logs.items() if not isinstance(value, str)},
                texts={str(name): value for name, value in logs.items() if isinstance(value, str)},
                images=response.get("images"),
                image_inputs=response.get("mm_train_inputs"),
            )
        except Exception as error:  # a reward's answer has been checked, an agent's comes from the user's code
            what = f"{type(error).__name__}: {one_line(error):.200}"
            raise TrainingStopped(
                "Expected --train.agent_func_path to return a response as OpenRLHF's MultiTurnAgentExecutor.execute "
                "does, with numbers as reward and scores, and numbers or texts as extra_logs, "
                f"got one that cannot be read ({what}): "
                f"{response!r:.300}"
            ) from error

    @property
    def num_actions(self) -> int:
        """The response's length. Upstream's is up to the last action, an agent's environment included."""
        return int(self.mask[1:].sum())

    def experience(self, max_len: int) -> Experience:
        """The row as upstream's batch of one; what upstream has no field for stays behind."""
        tokens, mask = torch.from_numpy(self.tokens), torch.from_numpy(self.mask[1:])
        info = {"response_clip_ratio": torch.tensor([len(tokens) >= max_len])}
        reward = None if self.reward is None else torch.tensor([self.reward], dtype=self.reward_dtype)
        if reward is not None:
            info["reward"] = reward
        for name, value in (("score", self.score), *self.logs.items(), *self.metrics.items()):
            if value is not None:
                info[name] = torch.tensor([value])
        return Experience(
            sequences=tokens.unsqueeze(0),
            attention_mask=torch.ones_like(tokens).unsqueeze(0),
            action_mask=mask.long().unsqueeze(0),
            rollout_log_probs=None if self.log_probs is None else torch.from_numpy(self.log_probs[None, 1:]),
            prompts=[self.prompt],
            labels=[None],  # rewards have read it, and a dump puts the row's number there
            images=[self.images],
            # Upstream's place for whatever else the model takes of a row.
            mm_train_inputs=[self.image_inputs if self.routes is None else {ROUTES: torch.from_numpy(self.routes)}],
            rewards=reward,
            scores=None if self.score is None else torch.tensor([self.score]),
            response_length=torch.tensor([self.num_actions]),
            truncated=torch.tensor([self.truncated]),
            total_length=torch.tensor([float(len(tokens))]),
            info=info,
        )


def ages(row: Row, begun_with: int, step: int) -> np.ndarray:
    """(n,) of the row's actions: steps between the policy that sampled them and the one that trains on them in
    ``step``. Where an engine does not say which it was, or was never told (Ray's transfer), it is that of step
    ``begun_with``."""
    if row.versions is None:
        return np.full(row.num_actions, step - 1 - begun_with)
    return step - 1 - np.maximum(row.versions[row.mask], begun_with)


def _number(name: str, value: Any) -> float | int | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") else value
    if not torch.tensor(number, dtype=torch.float32).isfinite():  # a filter would drop its group without a word
        raise ValueError(f"its {name} is {number}, which is not a finite float32")
    return number


def _first(value: Any) -> float | int:
    """A number as Python's, the first of several, as upstream logs it."""
    return torch.as_tensor(value).flatten()[0].item()


@dataclass
class Rollout:
    """What one step is trained on.

    Attributes:
        rows: in the order of their prompts, a prompt's responses side by side.
        others: rows with groups and statistics of their own, which join the step's training.
        prompts: drawn from the data, those that a filter dropped included.
        passed: percentage of them whose groups passed the filter; None without one.
        exhausted: whether no prompt is left in the episode.
        tokens: sampled, whatever became of them.
        dropped: prompts whose reward or agent failed.
        step: the number of the step, if it is not the next one.
        version: the step whose weights the engines had when they began.
        seconds: that the engines took.
        notes: what features add to a dump of the step, by name, as values for JSON.
    """

    rows: Sequence[Row]
    prompts: int
    exhausted: bool
    passed: float | None = None
    tokens: int = 0
    dropped: int = 0
    others: list[Row] = field(default_factory=list)
    step: int | None = None
    version: int = 0
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
