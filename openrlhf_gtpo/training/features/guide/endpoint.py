"""A guide behind an OpenAI-compatible endpoint (``--algo.guide.endpoint``), such as ``vllm serve`` provides, instead
of engines of this run. ``endpoint_requests.py`` has the requests.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec  # vLLM depends on it, and on openai
import openai
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.checks.reward import load_agent
from openrlhf_gtpo.training.features.guide.endpoint_requests import api_key, ids_and_log_probs, request
from openrlhf_gtpo.training.rollout.rewards import StrictRewardExecutor
from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor

_TRIES = 20  # of a request if the connection breaks or the server is busy: about two minutes, for a restart
_DEATHS = (
    openai.APIConnectionError,
    openai.InternalServerError,
    openai.RateLimitError,
    openai.AuthenticationError,
    openai.PermissionDeniedError,
)
_OURS = ("logprobs", "output_kind", "flat_logprobs", "detokenize")  # not for a request to a server


class EndpointActor(StrictRolloutActor):
    """A rollout actor whose engine is a server: rewards and agents run here, tokens come from the server."""

    async def __init__(  # type: ignore[misc]
        self, url: str, model: str, *, agent_func_path: str | None, remote_rm_url: Any
    ) -> None:
        self._mm_pad_token_ids, self._agent_path = None, agent_func_path or ""
        self.executor = (
            load_agent(agent_func_path) if agent_func_path else StrictRewardExecutor(remote_rm_url, self.patience)
        )
        self.llm = Endpoint(url, model)

    def vocab_size(self) -> None:
        """Return None, because the server does not report it. The policy's rows of the same agent are checked."""


class Endpoint:
    """A replacement for vLLM's engine in a rollout actor, which asks a server.

    Args:
        url: URL, such as ``http://host:8000/v1``.
        model: the model's name on the server.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._client = openai.AsyncOpenAI(base_url=url, api_key=api_key(), max_retries=_TRIES - 1, timeout=None)
        # Its own client, as one client sends only 1000 requests at once and a sign of life must not wait behind
        # prompts.
        self._watch = openai.AsyncOpenAI(base_url=url, api_key=api_key(), max_retries=0)

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the complete response to ``prompt["prompt_token_ids"]``.

        Raises:
            EngineDeadError: the server no longer answers, or refuses our key.
            TrainingStopped: the server refuses the request, or its response has no token ids or log-probs.
        """
        assert "multi_modal_data" not in prompt, "a server gets only text"
        tokens = prompt["prompt_token_ids"]
        try:
            answer = await self._client.completions.create(**request(self._model, tokens, _sampling(params)))
        except _DEATHS as error:
            raise EngineDeadError(f"{self._url}: {error}") from error
        except openai.APIStatusError as error:
            raise TrainingStopped(f"--algo.guide.endpoint {self._url} refused a request: {error}") from error
        choice = answer.choices[0]
        try:
            ids, log_probs = ids_and_log_probs(choice)
        except ValueError as error:
            raise TrainingStopped(f"--algo.guide.endpoint {self._url}: {error}") from error
        said: Any = [{i: Logprob(log_prob)} for i, log_prob in zip(ids, log_probs)]
        output = CompletionOutput(0, choice.text, ids, sum(log_probs), said, finish_reason=choice.finish_reason)
        yield RequestOutput(request_id, None, tokens, None, [output], True)

    async def is_sleeping(self) -> bool:
        """Return False once the server answers.

        Raises:
            EngineDeadError: the server cannot be reached.
        """
        try:
            await self._watch.models.list()
        except openai.APIError as error:
            raise EngineDeadError(f"{self._url}: {error}") from error
        return False


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the settings in ``params`` that differ from the defaults, for a server, without log-probs, which we
    set."""
    given, defaults = msgspec.structs.asdict(params), msgspec.structs.asdict(SamplingParams())
    return {"max_tokens": params.max_tokens} | {
        name: value
        for name, value in given.items()
        if value != defaults[name] and name not in _OURS and not name.startswith("_")
    }
