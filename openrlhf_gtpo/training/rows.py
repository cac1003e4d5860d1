"""Rows, from the engine that samples them to the training step, requests to engines, and rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.errors import TrainingStopped, one_line
from openrlhf_gtpo.token_values import TokenValues

ROUTES = "routes"  # name of a row's routes among the model's further inputs


class Request(NamedTuple):
    """A request to one engine for responses to one prompt."""

    prompt: str
    label: Any
    images: Any
    number: int  # of the prompt, in drawing order
    samples: int  # number of responses
    first: int = 0  # place of the first response in the prompt's group
    seed: tuple[int, ...] | None = None  # base of the responses' seeds; None: the engine's own generator
    is_trained: bool = True  # False in an evaluation
    engine: Any = None  # the engine to ask; None: the policy's engine with least to do
    variables: Mapping[str, Any] | None = None  # the chat template's variables for the prompt, for an agent's turns


class Dropped(NamedTuple):
    """An engine's answer to a request whose reward or agent failed, in a run that may drop the prompt."""

    reason: str


@dataclass
class Row:
    """One prompt with one response: n tokens, cut to ``--data.max_len``."""

    prompt: str
    label: Any
    number: int  # of the prompt (see ``Request``)
    tokens: np.ndarray  # (n,) int64, prompt and response
    mask: np.ndarray  # (n,) bool, True at action tokens
    log_probs: np.ndarray | None  # (n,) float32, from the engine that sampled the row; 0 outside the mask
    reward: float | int | None  # None: a reward model gives it
    score: float | int | None
    truncated: bool = False
    logs: dict[str, Any] = field(default_factory=dict)  # the numbers among the reward's extra_logs
    texts: dict[str, str] = field(default_factory=dict)  # the texts among them, for dumps
    images: Any = None
    image_inputs: Any = None  # what upstream's image processor made of them
    reward_dtype: torch.dtype | None = None  # precision for deciding success; None: torch's default for the number
    values: TokenValues | None = None  # (n,) each, from the policy's sampler; NaN where it has none
    routes: np.ndarray | None = None  # (n, layers, k) experts of a ``TokenRow``, from the policy's sampler
    versions: np.ndarray | None = None  # (n,) int32, the steps of the weights that drew the actions; -1: unknown
    off_policy: bool = False  # whether the row's ratio is to the engine's ``log_probs`` instead of the old policy
    weight: float = 1.0  # factor of its advantages
    metrics: dict[str, float] = field(default_factory=dict)  # averaged over rows, and logged

    @classmethod
    def of_response(cls, response: dict[str, Any], number: int, max_len: int, vocab_size: int | None = None) -> "Row":
        """Make a row from a response of OpenRLHF's executors or of an agent.

        Args:
            number: the prompt's number.
            vocab_size: the model's vocabulary size, to check an agent's tokens.

        Raises:
            TrainingStopped: an agent returned something that is not a response.
        """
        # Check an agent's response, and make the mask.
        try:
            tokens, log_probs = response["observation_tokens"], response["rollout_log_probs"]
            mask: np.ndarray = np.zeros(len(tokens), dtype=bool)
            for start, end in response["action_ranges"]:
                mask[start:end] = True
            if log_probs is not None and len(log_probs) != len(tokens):  # such as from an agent that asks for none
                raise ValueError(f"it has {len(log_probs)} rollout_log_probs for {len(tokens)} observation_tokens")
            if unknown := [token for token in tokens if vocab_size and not 0 <= token < vocab_size]:
                raise ValueError(f"token {unknown[0]} is not in the model's vocabulary of {vocab_size}")
            numbers = {name: _number(name, response.get(name)) for name in ("reward", "scores")}
            # Upstream ends an agent whose context is full, but marks it as truncated only if its last turn was cut
            # off.
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
        except Exception as error:  # an agent's response comes from the user's code
            what = f"{type(error).__name__}: {one_line(error):.200}"
            raise TrainingStopped(
                "Expected --train.agent_func_path to return a response as OpenRLHF's MultiTurnAgentExecutor.execute "
                "does, with numbers as reward and scores, and numbers or texts as extra_logs, "
                f"got one that cannot be read ({what}): "
                f"{response!r:.300}"
            ) from error

    @property
    def num_actions(self) -> int:
        """The response's length in actions. Upstream counts up to the last action, with an agent's environment."""
        return int(self.mask[1:].sum())

    def experience(self, max_len: int) -> Experience:
        """Return the row as upstream's batch of one, without what upstream has no field for."""
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
            labels=[None],  # rewards have read it; a dump puts the row's number here
            images=[self.images],
            # Upstream's field for the model's further inputs.
            mm_train_inputs=[self.image_inputs if self.routes is None else {ROUTES: torch.from_numpy(self.routes)}],
            rewards=reward,
            scores=None if self.score is None else torch.tensor([self.score]),
            response_length=torch.tensor([self.num_actions]),
            truncated=torch.tensor([self.truncated]),
            total_length=torch.tensor([float(len(tokens))]),
            info=info,
        )


def ages(row: Row, begun_with: int, step: int) -> np.ndarray:
    """Return (n,) ages of the row's actions: steps from the policy that sampled them to the policy that trains on them
    in ``step``. Where the engine does not report its weights (or with Ray's transfer), step ``begun_with`` is
    assumed."""
    if row.versions is None:
        return np.full(row.num_actions, step - 1 - begun_with)
    return step - 1 - np.maximum(row.versions[row.mask], begun_with)


def _number(name: str, value: Any) -> float | int | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") else value
    if not torch.tensor(number, dtype=torch.float32).isfinite():  # a filter would silently drop its group
        raise ValueError(f"its {name} is {number}, which is not a finite float32")
    return number


def _first(value: Any) -> float | int:
    """Return a Python number, the first if there are several, as upstream logs it."""
    return torch.as_tensor(value).flatten()[0].item()


@dataclass
class Rollout:
    """The rows that one step trains on.

    Attributes:
        rows: rows in the order of their prompts, a prompt's responses next to each other.
        others: rows with their own groups and statistics, which join the step's training.
        prompts: number of prompts drawn, including those that a filter dropped.
        passed: percentage of prompts whose groups passed the filter; None without a filter.
        exhausted: whether the episode has no prompts left.
        tokens: number of sampled tokens, including dropped ones.
        dropped: number of prompts whose reward or agent failed.
        step: the number of the step, if it is not the next one.
        version: the step whose weights the engines had at the start.
        seconds: seconds that the engines took.
        notes: features' additions to a dump of the step, by name, as values for JSON.
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
