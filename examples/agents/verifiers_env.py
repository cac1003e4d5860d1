"""An environment written for verifiers: `--train.agent_func_path examples/agents/verifiers_env.py`.

    pip install 'verifiers==0.1.9' ENVIRONMENT
    VERIFIERS_ENV=ENVIRONMENT VERIFIERS_ENV_ARGS='{"difficulty": "easy"}' python3 -m openrlhf_gtpo.cli.train_ppo_ray …

A row's label is the environment's own row as JSON, and its input the same messages:

    rows = verifiers.load_environment("ENVIRONMENT").get_dataset()
    file.writelines(json.dumps({"input": row["prompt"], "label": json.dumps(row)}) + "\\n" for row in rows)

This is the protocol of verifiers 0.1: a `MultiTurnEnv` keeps its state beside the conversation, answers in messages
(`env_response`), tells when it is over (`is_completed`), and its rubric scores the state. The run's own engine
replaces verifiers' client. Tools that need a server are not offered to the policy.
"""

import functools
import json
import os
from contextlib import nullcontext
from typing import Any

import verifiers

from openrlhf_gtpo.training.rollout.turns import Environment, TurnsExecutor


@functools.cache
def loaded() -> Any:
    """Load the environment that all conversations of this process share, as in verifiers."""
    return verifiers.load_environment(
        os.environ["VERIFIERS_ENV"], **json.loads(os.environ.get("VERIFIERS_ENV_ARGS", "{}"))
    )


class Verifiers(Environment):
    state: Any = None

    async def reply(self, text: str) -> str | None:
        environment = loaded()
        if self.state is None:
            state = await environment.init_state(json.loads(self.label), None, "policy", None)
            self.state = await environment.setup_state(state)
            self.messages = [*self.state["prompt"]]
        answer = [{"role": "assistant", "content": text}]
        step = {"prompt": self.messages, "completion": answer, "response": None, "tokens": None, "reward": None}
        step |= {"advantage": None, "is_truncated": False, "trajectory_id": self.state["trajectory_id"], "extras": {}}
        await environment.add_trajectory_step(self.state, step)
        self.messages = [*self.messages, *answer]
        if await environment.is_completed(self.state):
            return None
        said = await environment.env_response(self.messages, self.state)
        self.messages = [*self.messages, *said]
        if self.state.get("final_env_response") is not None:
            return None
        return "\n".join(message["content"] for message in said)

    async def score(self) -> tuple[float, dict[str, float | str]]:
        environment = loaded()
        await environment.render_completion(self.state)
        await environment.rubric.score_rollout(self.state, score_sem=nullcontext())
        return float(self.state["reward"]), {f"env/{name}": value for name, value in self.state["metrics"].items()}


class AgentExecutor(TurnsExecutor):
    environment = Verifiers
    turns = 10
