"""Agents in several turns, for ``--train.agent_func_path``: a conversation between the policy and an environment.

Tokens are only ever appended: what was sampled in a turn is what is trained on, and rendering the conversation again
would give other tokens where a template prints earlier turns differently. What stands between two turns, the end of
the policy's message included if it was not sampled, is the template's and the environment's: no action, and so without
credit, and in no mean, length or denominator.
"""

from abc import ABC, abstractmethod
from copy import deepcopy
from functools import lru_cache
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from openrlhf_gtpo.errors import UsageError

_ANSWER, _REPLY = "\u2460answer\u2460", "\u2461reply\u2461"  # stand for texts in a template


class Environment(ABC):
    """What the policy talks to in one response.

    Args:
        prompt: as the policy reads it, special tokens included.
        label: the row's.
    """

    def __init__(self, prompt: str, label: Any) -> None:
        self.prompt, self.label = prompt, label

    @abstractmethod
    async def reply(self, text: str) -> str | None:
        """The environment's answer to what the policy said, without special tokens; None ends the conversation."""

    @abstractmethod
    async def score(self) -> tuple[float, dict[str, float | str]]:
        """The reward of the conversation, however it ended, and ``extra_logs``: the same names each time."""

    async def close(self) -> None:  # noqa: B027  # few environments hold anything
        """Nothing follows, whether or not there was a score."""


class TurnsExecutor(AgentExecutorBase):
    """An ``AgentExecutor`` for an agent file: a derived class names its ``environment``.

    A turn has at most ``--rollout.max_new_tokens`` tokens. A conversation that has no room for the environment's
    answer within ``--data.max_len``, or whose last turn was cut off, is truncated, and scored as it is.

    Attributes:
        environment: makes the environment of a response.
        turns: the most turns of the policy.
        stop: texts that end a turn, and stay in it.
        role: of the environment's messages.
        variables: for the chat template, as ``--data.chat_template_kwargs``.
    """

    environment: type[Environment]
    turns = 4
    stop: tuple[str, ...] = ()
    role = "user"
    variables: dict[str, Any] = {}

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        tokens: list[int] = hf_tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
        log_probs, actions, truncated = [0.0] * len(tokens), [], False
        environment = self.environment(prompt, label)
        try:
            for turn in range(1, self.turns + 1):
                # The policy.
                params = deepcopy(sampling_params)
                room = max_length - len(tokens)
                params.max_tokens = min(room, params.max_tokens or room)
                params.stop, params.include_stop_str_in_output = [*self.stop], True
                answer = (await llm_engine.generate(tokens, params)).outputs[0]
                sampled = list(answer.token_ids)
                actions.append((len(tokens), len(tokens) + len(sampled)))
                tokens = tokens + sampled
                if answer.logprobs is not None:
                    log_probs += [of[token].logprob for token, of in zip(sampled, answer.logprobs, strict=True)]
                truncated = answer.finish_reason == "length"
                # The environment.
                reply = await environment.reply(hf_tokenizer.decode(sampled, skip_special_tokens=True))
                if reply is None or truncated or turn == self.turns:
                    break
                between = self._between(hf_tokenizer, reply, sampled)
                if len(tokens) + len(between) >= max_length:
                    truncated = True
                    break
                tokens, log_probs = tokens + between, log_probs + [0.0] * len(between)
            reward, logs = await environment.score()
        finally:
            await environment.close()
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "observation_tokens": tokens,
            "action_ranges": actions,
            "rollout_log_probs": None if sampling_params.logprobs is None else log_probs,
            "reward": reward,
            "scores": reward,
            "truncated": truncated,
            "extra_logs": {"turns": float(len(actions)), **logs},
        }

    def _between(self, tokenizer: Any, reply: str, sampled: list[int]) -> list[int]:
        """The tokens from the end of what was ``sampled`` to the beginning of the policy's next turn."""
        text = between_turns(tokenizer, self.role, tuple(self.variables.items())).replace(_REPLY, reply)
        ids: list[int] = tokenizer(text=text, add_special_tokens=False)["input_ids"]
        ended = bool(sampled) and sampled[-1] in tokenizer.all_special_ids
        return ids[1:] if ended and ids[:1] == sampled[-1:] else ids


@lru_cache
def between_turns(tokenizer: Any, role: str, variables: tuple[tuple[str, Any], ...] = ()) -> str:
    """What a chat template prints between an answer of the policy and its next one, with a mark for the environment's
    message, of ``role``.

    Raises:
        UsageError: the template has no such turns.
    """
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _ANSWER},
        {"role": role, "content": _REPLY},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **dict(variables))
    except Exception as error:  # templates are programs
        raise UsageError(f"The chat template does not print a turn of {role}: {error}") from error
    if text.count(_ANSWER) != 1 or text.count(_REPLY) != 1:
        raise UsageError(f"The chat template does not print the assistant's turn and that of {role} once each.")
    return text.partition(_ANSWER)[2]
