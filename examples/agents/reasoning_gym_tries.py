"""Any reasoning-gym task with several tries: `--train.agent_func_path examples/agents/reasoning_gym_tries.py`.

    python3 -m openrlhf_gtpo.cli.prepare task --task gcd --output DIR

makes `DIR/train.jsonl`, for training with `--data.label_key scorer_label`. The policy learns whether its answer is
right, and may try again.
"""

from openrlhf_gtpo.tasks.reasoning_gym_reward import answer_of, reward_func
from openrlhf_gtpo.training.rollout.turns import Environment, TurnsExecutor


class Tries(Environment):
    answer, tries = "", 0

    async def reply(self, text: str) -> str | None:
        self.answer, self.tries = text, self.tries + 1
        return None if self._score()["scores"] == 1 else "That is not right. Try again."

    async def score(self) -> tuple[float, dict[str, float | str]]:
        parsed = answer_of([self.prompt + self.answer], [self.prompt], [self.label])
        return float(self._score()["rewards"]), {"tries": float(self.tries), "parsed": parsed or ""}

    def _score(self) -> dict[str, float]:
        return reward_func([self.prompt + self.answer], [self.prompt], [self.label])


class AgentExecutor(TurnsExecutor):
    environment = Tries
    turns = 2
