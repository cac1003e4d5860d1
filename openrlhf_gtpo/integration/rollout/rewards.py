"""Single-turn rollouts whose reward must arrive: upstream logs a failed reward and goes on without one."""

from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_gtpo.errors import TrainingStopped


class StrictRewardExecutor(SingleTurnAgentExecutor):
    """Raises TrainingStopped with the prompt when the reward function or server fails, or returns no reward."""

    async def execute(self, prompt: str, label: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = await super().execute(prompt, label, *args, **kwargs)
        if self.reward_endpoints and output["reward"] is None:
            raise TrainingStopped(
                f"Could not get the reward of a response from {self.reward_endpoints[0]}: it returned no 'rewards' "
                f"or raised (its own message is in the log above). Prompt: {prompt!r}"
            )
        return output
