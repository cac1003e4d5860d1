"""The sampler's entropies in an engine's actor: lets vLLM's sampler report them, and gives them to the rows."""

from collections.abc import Sequence
from typing import Any

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.feature import EngineFeature
from openrlhf_gtpo.training.features.sampler_entropy.answers import refuse_other_distributions, sampler_values
from openrlhf_gtpo.training.rollout.answers import Answer
from openrlhf_gtpo.training.rows import Row


class SamplerEntropyInEngine(EngineFeature):
    """An engine's part, which gives ``values`` at ``temperature``, and ``versions``, to rows for training."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._vocab_size = 0

    async def start(self, llm: Any) -> None:
        """Let the sampler report entropies. Raises TrainingStopped if vLLM has an unknown sampler."""
        unknown = await llm.collective_rpc("capture_entropy", args=(self._temperature,))
        if any(unknown):
            raise TrainingStopped(
                f"vLLM uses {unknown[0]} here, a sampler that cannot report entropies; give --rollout.entropy actor."
            )
        self._vocab_size = llm.model_config.get_vocab_size()

    def on_request(self, params: Any) -> None:
        """Ask for values. Raises TrainingStopped if an agent's ``params`` change the distribution."""
        refuse_other_distributions(params, self._temperature)
        params.logprobs = 0  # of the sampled token only
        params.flat_logprobs = True  # no objects per token

    def on_row(self, row: Row, response: dict[str, Any], answers: Sequence[Answer] | None) -> None:
        if answers is None:
            return
        values, versions = sampler_values(
            response["observation_tokens"],
            response["action_ranges"],
            answers,
            self._vocab_size,
            f"a response to prompt {row.number}",
        )
        row.values = TokenValues(*values[:, : len(row.tokens)])
        row.versions = versions[: len(row.tokens)]
