"""Agents in several turns, for ``--train.agent_func_path``: conversations between the policy and an environment.

Tokens are only appended, because the policy trains on exactly what it sampled: to render the conversation again would
give other tokens where a template prints earlier turns differently. Tokens between two turns come from the template
and the environment, also the end of the policy's message if it was not sampled. They are not actions: they get no
advantage and count in no mean, length or denominator.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.checks.model import special_texts, special_tokens

# The chat template's variables for the current task's prompt, and for each of its turns.
template_variables: ContextVar[Mapping[str, Any]] = ContextVar("template_variables", default=MappingProxyType({}))

_closing: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task

_ANSWER, _REPLY = "\u2460answer\u2460", "\u2461reply\u2461"  # stand for texts in a template


class Environment(ABC):
    """The environment of one response, which the policy talks to.

    Args:
        prompt: the prompt as the policy reads it, with special tokens.
        label: the row's label.
    """

    def __init__(self, prompt: str, label: Any) -> None:
        self.prompt, self.label = prompt, label

    @abstractmethod
    async def reply(self, text: str) -> str | None:
        """Answer the policy; None ends the conversation. ``text`` has special tokens, such as a tool call's, but not
        the token that ended the turn."""

    @abstractmethod
    async def score(self) -> tuple[float, dict[str, float | str]]:
        """Return the reward of the conversation, however it ended, and ``extra_logs`` with the same names each
        time."""

    async def close(self) -> None:  # noqa: B027  # few environments hold anything
        """Release resources. Called at the end in any case, with or without a score."""


class TurnsExecutor(AgentExecutorBase):
    """An ``AgentExecutor`` for an agent file: a derived class names its ``environment``.

    A turn has at most ``--rollout.max_new_tokens`` tokens. A conversation is truncated, and scored as it is, if the
    environment's answer does not fit within ``--data.max_len`` or if its last turn was cut off.

    Attributes:
        environment: the class of a response's environment.
        turns: maximum turns of the policy.
        stop: texts that end a turn, and stay in it.
        role: role of the environment's messages.
        variables: defaults of the chat template's variables; the run's and the row's override them.
    """

    environment: type[Environment]
    turns = 4
    stop: tuple[str, ...] = ()
    role = "user"
    variables: Mapping[str, Any] = MappingProxyType({})

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
                # The policy speaks, within the room that is left.
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
                # The environment answers, unless the conversation ends here.
                stopped_by = getattr(answer, "stop_reason", None)  # a token's id or a text; None for the usual token
                is_end = sampled and (isinstance(stopped_by, int) or sampled[-1] in special_tokens(hf_tokenizer))
                end = sampled[-1:] if answer.finish_reason == "stop" and is_end else []
                said = sampled[: len(sampled) - len(end)]
                reply = await environment.reply(hf_tokenizer.decode(said, skip_special_tokens=False))
                if reply is None or truncated or turn == self.turns:
                    break
                between = self._between(hf_tokenizer, reply, end)
                if len(tokens) + len(between) >= max_length:
                    truncated = True
                    break
                tokens, log_probs = tokens + between, log_probs + [0.0] * len(between)
            # The reward, for the whole conversation.
            reward, logs = await environment.score()
        finally:
            closing = asyncio.ensure_future(environment.close())
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            await asyncio.shield(closing)
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

    def _between(self, tokenizer: Any, reply: str, end: list[int]) -> list[int]:
        """Return the tokens from the last sampled token to the beginning of the policy's next turn.

        Args:
            end: the token that ended the turn, if it has one. The template's end token, which may differ, is left out.
        """
        variables = {**self.variables, **template_variables.get()}
        closing, before, after = between_turns(tokenizer, self.role, variables)
        special = special_tokens(tokenizer)

        def ids_of(text: str, **options: Any) -> list[int]:
            return list(tokenizer(text=text, add_special_tokens=False, **options)["input_ids"])

        if special_texts(tokenizer).search(reply):  # could end its turn and begin another
            inner = ids_of(reply, split_special_tokens=True)
            assert not special_texts(tokenizer).search("".join(special.get(token, "") for token in inner))
            ids = [*ids_of(closing + before), *inner, *ids_of(after)]
        else:
            ids = ids_of(f"{closing}{before}{reply}{after}")
        ends = special | {token: tokenizer.decode([token]) for token in end}
        if end and any(text in closing for text in ends.values()):
            return ids[next(place for place, token in enumerate(ids) if token in ends) + 1 :]
        return ids


def check_turns(executor: type[Any], tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Refuse an agent whose second turn the model's chat template does not print.

    Args:
        executor: the agent's class; if it is not a :class:`TurnsExecutor`, it makes its turns itself.
        variables: the run's variables for the template.
    """
    is_ours = isinstance(executor, type) and issubclass(executor, TurnsExecutor)
    if is_ours and executor._between is TurnsExecutor._between and executor.turns > 1:
        try:
            between_turns(tokenizer, executor.role, {**executor.variables, **variables})
        except UsageError as error:
            raise UsageError(f"{error} An agent that answers once has turns = 1.") from error


def between_turns(
    tokenizer: Any, role: str, variables: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, str, str]:
    """Return what a chat template prints between two turns of the policy: the end of the first turn, and the texts
    before and after the environment's message of ``role``.

    Raises:
        UsageError: the template does not print such turns.
    """
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _ANSWER},
        {"role": role, "content": _REPLY},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    except Exception as error:  # templates are programs
        raise UsageError(f"The chat template does not print a turn of {role}: {one_line(error)}.") from error
    if text.count(_ANSWER) != 1 or text.count(_REPLY) != 1:
        raise UsageError(f"The chat template does not print an assistant's turn and a turn of {role} once each.")
    before, _, after = text.partition(_ANSWER)[2].partition(_REPLY)
    try:
        ended = tokenizer.apply_chat_template(messages[:2], tokenize=False, **variables)
    except Exception:  # from a template that needs a question at the end
        ended = text
    closing = os.path.commonprefix([before, ended.partition(_ANSWER)[2]])
    return closing, before[len(closing) :], after
