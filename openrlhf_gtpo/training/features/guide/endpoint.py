"""A guide behind an OpenAI-compatible endpoint (``--algo.guide.endpoint``), such as ``vllm serve`` provides, in place
of engines of this run. For what is asked of it, see ``endpoint_requests.py``.
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
from openrlhf_gtpo.training.features.guide.endpoint_requests import api_key, request, sampled
from openrlhf_gtpo.training.rollout.rewards import StrictRewardExecutor
from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor

_TRIES = 20  # of a request whose connection breaks or whose server is busy: about two minutes, as it may restart
_DEATHS = (
    openai.APIConnectionError,
    openai.InternalServerError,
    openai.RateLimitError,
    openai.AuthenticationError,
    openai.PermissionDeniedError,
)
_OURS = ("logprobs", "output_kind", "flat_logprobs", "detokenize")  # not for a request to a server


class EndpointActor(StrictRolloutActor):
    """Rollout actor whose engine is a server: rewards and agents run here, tokens come from there."""

    async def __init__(  # type: ignore[misc]
        self, url: str, model: str, *, agent_func_path: str | None, remote_rm_url: Any
    ) -> None:
        self._mm_pad_token_ids, self._agent_path = None, agent_func_path or ""
        self.executor = (
            load_agent(agent_func_path) if agent_func_path else StrictRewardExecutor(remote_rm_url, self.patience)
        )
        self.llm = Endpoint(url, model)

    def vocab_size(self) -> None:
        """None: the server does not say. The same agent's rows of the policy are checked."""


class Endpoint:
    """Stands in for vLLM's engine in a rollout actor, and asks a server instead.

    Args:
        url: such as ``http://host:8000/v1``.
        model: the name under which the server has it.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._client = openai.AsyncOpenAI(base_url=url, api_key=api_key(), max_retries=_TRIES - 1, timeout=None)
        # A sign of life must not wait behind prompts, of which a client sends 1000 at once.
        self._watch = openai.AsyncOpenAI(base_url=url, api_key=api_key(), max_retries=0)

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the response to ``prompt["prompt_token_ids"]``, whole.

        Raises:
            EngineDeadError: the server no longer answers, or no longer answers us.
            TrainingStopped: the server refuses the request, or its response has no token ids or log-probs.
        """
        assert "multi_modal_data" not in prompt, "a server gets text alone"
        tokens = prompt["prompt_token_ids"]
        try:
            answer = await self._client.completions.create(**request(self._model, tokens, _sampling(params)))
        except _DEATHS as error:
            raise EngineDeadError(f"{self._url}: {error}") from error
        except openai.APIStatusError as error:
            raise TrainingStopped(f"--algo.guide.endpoint {self._url} refused a request: {error}") from error
        choice = answer.choices[0]
        try:
            ids, log_probs = sampled(choice)
        except ValueError as error:
            raise TrainingStopped(f"--algo.guide.endpoint {self._url}: {error}") from error
        said: Any = [{i: Logprob(log_prob)} for i, log_prob in zip(ids, log_probs)]
        output = CompletionOutput(0, choice.text, ids, sum(log_probs), said, finish_reason=choice.finish_reason)
        yield RequestOutput(request_id, None, tokens, None, [output], True)

    async def is_sleeping(self) -> bool:
        """False as soon as the server answers.

        Raises:
            EngineDeadError: the server cannot be reached.
        """
        try:
            await self._watch.models.list()
        except openai.APIError as error:
            raise EngineDeadError(f"{self._url}: {error}") from error
        return False


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The settings in ``params`` that differ from the defaults, for a server, but for log-probs, which we choose."""
    given, defaults = msgspec.structs.asdict(params), msgspec.structs.asdict(SamplingParams())
    return {"max_tokens": params.max_tokens} | {
        name: value
        for name, value in given.items()
        if value != defaults[name] and name not in _OURS and not name.startswith("_")
    }
