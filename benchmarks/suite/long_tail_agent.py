"""An agent for ``--train.agent_func_path`` whose response lengths have a long tail, like a reasoning model's. For
measurements with a model that would end all responses early. Lengths are log-uniform from 64 to 768 tokens."""

import random
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

SHORTEST, LONGEST = 64, 768


class AgentExecutor(AgentExecutorBase):
    """Counts a quarter of the responses as right, independent of their text."""

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
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sampling_params.max_tokens = int(SHORTEST * (LONGEST / SHORTEST) ** random.random())
        sampling_params.ignore_eos = True
        output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        said = [of_token[token].logprob for token, of_token in zip(output.token_ids, output.logprobs, strict=True)]
        reward = float(sum(output.token_ids) % 4 == 0)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": [*tokens, *output.token_ids],
            "action_ranges": [(len(tokens), len(tokens) + len(output.token_ids))],
            "rollout_log_probs": [0.0] * len(tokens) + said,
            "reward": reward,
            "scores": reward,
            "truncated": False,
            "extra_logs": {},
        }
