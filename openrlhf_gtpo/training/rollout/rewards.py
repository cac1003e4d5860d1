"""Calls of a user's rewards and agents: repeated if they fail or take too long, and held to one number per reward."""

import asyncio
import contextvars
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_gtpo.errors import TrainingStopped, UsageError, one_line
from openrlhf_gtpo.platform.patience import since
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.reward import import_reward, takes_responses

T = TypeVar("T")

TRIES = 3  # in a run that may drop the prompt
TRIAL_SECONDS = 20.0  # a reward may start a process, or ask a model

_FAILURE = "failure"  # in a response's extra logs: the error of its reward
_THREADS = min(32, (os.cpu_count() or 1) + 4)  # for reward functions, as in asyncio.to_thread


class RewardFailed(TrainingStopped):
    """Every try of a reward raised or did not answer."""


class Patience(NamedTuple):
    """The number of tries, and the seconds for each; 0 is forever."""

    tries: int = 1
    seconds: float = 0.0

    @classmethod
    def of(cls, args: Arguments) -> "Patience":
        """Return the patience that a run's arguments ask for."""
        return cls(TRIES if args.train.max_restarts else 1, args.train.stall_timeout)

    async def ask(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Return the result of ``call()``; raise the error of the last try, a TimeoutError if it took too long."""
        for _ in range(self.tries - 1):
            try:
                return await self._in_time(call)
            except Exception as failure:  # a user's code
                print(f"Warning: {what} failed; trying again: {described(failure)}", flush=True)
        return await self._in_time(call)

    async def _in_time(self, call: Callable[[], Awaitable[T]]) -> T:
        began = [time.monotonic(), 0]
        since.set(began)
        task = asyncio.ensure_future(call())
        try:
            while self.seconds and not task.done():
                left = began[0] + self.seconds - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer for {self.seconds:g} s")
                await asyncio.wait({task}, timeout=min(left, self.seconds))
            return await task
        finally:
            task.cancel()


def described(failure: BaseException) -> str:
    """Describe an exception on one line: its type and the beginning of its text."""
    return f"{type(failure).__name__}: {one_line(failure):.500}"


def reward_and_score(returned: Any) -> tuple[float, float]:
    """Return the 'rewards' and 'scores' that a reward function or server returned for one response. Each may be in a
    list or tensor; without 'scores', 'rewards' counts as both.

    Raises:
        TrainingStopped: they are not finite float32 numbers; the reason, as a clause.
    """
    if not isinstance(returned, Mapping):
        raise TrainingStopped(f"it returned {returned!r:.200}, not a dict with 'rewards'")
    numbers = {name: returned[name] for name in ("rewards", "scores") if returned.get(name) is not None}
    if "rewards" not in numbers:
        raise TrainingStopped("it returned no 'rewards'")
    for name, value in numbers.items():
        try:
            numbers[name] = torch.as_tensor(value, dtype=torch.float64).reshape(()).item()
        except (TypeError, ValueError, RuntimeError):
            numbers[name] = math.nan
        if not torch.tensor(numbers[name]).isfinite():  # a filter would silently drop its group
            got = f"{name!r} {str(value)[:200]!r}"
            raise TrainingStopped(f"expected one finite float32 number for the one response, got {got}")
    return numbers["rewards"], numbers.get("scores", numbers["rewards"])


def reason_of(failure: BaseException, source: str) -> str:
    """Say why there is no reward, as a clause: from :func:`reward_and_score`, or the error of the user's code with its
    line, in the file ``source`` if possible."""
    if isinstance(failure, TrainingStopped):
        return str(failure)
    frames = traceback.extract_tb(failure.__traceback__)
    frame = ([f for f in frames if f.filename == os.path.abspath(source)] or frames)[-1]
    return f"{described(failure)} ({frame.filename}, line {frame.lineno})"


def refuse_taken_names(extra_logs: Iterable[str], source: str) -> None:
    """Refuse names of a step's own metrics. The user's number would replace such a metric, or end the run once the
    step is trained.

    Raises:
        TrainingStopped: with the names.
    """
    if taken := sorted(name for name in map(str, extra_logs) if names.is_taken(name)):
        raise TrainingStopped(
            f"Expected new names in the 'extra_logs' from {source}, got {', '.join(taken)}, which the run uses for "
            "its own metrics; rename it there."
        )


class _Generation:
    """An engine that remembers the tokens of its one response."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._tokens: Sequence[int] = ()

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await self._engine.generate(*args, **kwargs)
        self._tokens = output.outputs[0].token_ids
        return output

    def text(self) -> str:
        """Decode the response without special tokens."""
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)


_generation: ContextVar[_Generation] = ContextVar("_generation")


class StrictRewardExecutor(SingleTurnAgentExecutor):
    """Upstream's executor, but strict: it raises TrainingStopped with reason and prompt if the reward function or
    server fails, or returns anything but one number, which may be in a list or tensor.

    Upstream logs a failed reward and continues without one. It also turns (1,) lists, the answers of its own reward
    server, into a column (openrlhf 0.11.2, utils/agent.py, SingleTurnAgentExecutor.execute). Can go once it raises.
    """

    def __init__(self, remote_rm_url: Any, patience: Patience) -> None:
        files = [url for url in remote_rm_url or () if url.endswith(".py")]
        super().__init__(None if files else remote_rm_url)  # upstream's module of a file is not in sys.modules
        if files:
            self.reward_endpoints = files
            self.reward_func = import_reward(files[0])
        self._source = " or ".join(self.reward_endpoints)  # upstream asks several servers in turn
        self._patience = patience
        self._threads = asyncio.Semaphore(_THREADS)

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        # Response and reward by upstream's executor, which hands on what the reward returned or raised.
        _generation.set(generation := _Generation(llm_engine, hf_tokenizer))
        output = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, generation, images)
        if not self.reward_endpoints:
            return output
        returned, failure = output["reward"], output["extra_logs"].get(_FAILURE)
        try:
            if failure is not None:
                raise failure
            output["reward"], output["scores"] = reward_and_score(returned)
        except Exception as error:  # a user's code
            reason = reason_of(error, self.reward_endpoints[0])
            raise (TrainingStopped if failure is None else RewardFailed)(
                f"Could not get the reward of a response from {self._source}: {reason}. Prompt: {prompt!r}"
            ) from failure
        # The reward's logs: numbers for metrics, texts for dumps.
        logs = returned.get("extra_logs")
        try:
            output["extra_logs"] = {  # upstream takes the first number of a tensor, but not of a list
                name: (
                    value
                    if isinstance(value, str)
                    else torch.as_tensor(value, dtype=torch.float64).flatten()[0].item()
                )
                for name, value in (logs or {}).items()
            }
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise TrainingStopped(
                f"Expected 'extra_logs' from {self._source} to map each name to a number or a text, got "
                f"{str(logs)[:200]!r}. Prompt: {prompt!r}"
            ) from error
        numbers = [name for name, value in output["extra_logs"].items() if not isinstance(value, str)]
        refuse_taken_names(numbers, self._source)
        return output

    async def _fetch_rewards_via_func(self, *columns: Any) -> list[dict[str, Any]]:
        """Like upstream's, but each call in its own thread, so that a hanging call blocks no other."""
        more = {"responses": [_generation.get().text()]} if takes_responses(self.reward_func) else {}
        async with self._threads:
            return await self._or_failure(
                lambda: asyncio.wrap_future(_in_thread(partial(self.reward_func, *columns, **more)))
            )

    async def _fetch_rewards_via_http(self, *columns: Any) -> list[dict[str, Any]]:
        fetch = super()._fetch_rewards_via_http
        return await self._or_failure(lambda: fetch(*columns))

    async def _or_failure(self, fetch: Callable[[], Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """Make a reward that upstream's ``execute`` hands on: the whole result or, in its logs, the error."""
        try:
            [returned] = await self._patience.ask(fetch, f"the reward from {self._source}")
            return [{"rewards": returned}]
        except Exception as failure:  # a user's code
            return [{"rewards": None, "extra_logs": {_FAILURE: failure}}]


def _in_thread(function: Callable[[], T]) -> Future[list[T]]:
    result: Future[list[T]] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            result.set_result([function()])
        except Exception as failure:  # a user's code
            result.set_exception(failure)
        except SystemExit as ended:  # would end only this thread, and the run would wait for a result
            error = RuntimeError(f"it called sys.exit({ended.code!r})")
            result.set_exception(error.with_traceback(ended.__traceback__))

    # Unlike a pool's thread, one that never returns does not keep the process from exiting.
    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return result


def try_reward(reward_func: Callable[..., Any], source: str, prompt: str, label: Any) -> None:
    """Call a reward function once with an empty response, in a thread as in training. Print a warning if it fails,
    since it may work for other responses. A slow call proves nothing.

    Raises:
        UsageError: a name or a module is missing.
    """
    more = {"responses": [""]} if takes_responses(reward_func) else {}
    asked = _in_thread(partial(reward_func, [prompt], [prompt], [label], **more))
    if not wait([asked], TRIAL_SECONDS).done:
        return
    try:
        [returned] = asked.result()
        reward_and_score(returned)
    except Exception as failure:  # a user's code
        reason = reason_of(failure, source)
        if isinstance(failure, ImportError) or type(failure) is NameError:
            raise UsageError(f"--reward.remote_url {source} cannot be used: {reason}.") from failure
        print(
            f"Warning: {source} has no reward for an empty response to the first prompt: {reason}. A response "
            "without a reward stops the run; return a number for every response.",
            file=sys.stderr,
        )
