"""An agent that may run Python: `--train.agent_func_path examples/agents/python_tool.py`.

A block ```python … ``` runs in its own folder, without network, other files or processes, under limits of time and
memory (`openrlhf_gtpo/tasks/sandbox.py`). The policy gets its output. A response without a block ends the
conversation, and its last number is compared with the label.
"""

import re

from openrlhf_gtpo.tasks.sandbox import run_python, why_no_sandbox
from openrlhf_gtpo.training.rollout.turns import Environment, TurnsExecutor

if (why := why_no_sandbox()) is not None:  # reported before anything starts
    raise RuntimeError(f"Python cannot be confined: {why}")

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Python(Environment):
    answer, ran = "", 0

    async def reply(self, text: str) -> str | None:
        self.answer = text
        found = BLOCK.search(text)
        if found is None:
            return None
        self.ran += 1
        return await run_python(found[1], seconds=5) or "It printed nothing."

    async def score(self) -> tuple[float, dict[str, float | str]]:
        numbers = NUMBER.findall(self.answer)
        reward = float(bool(numbers) and BLOCK.search(self.answer) is None and numbers[-1] == str(self.label))
        return reward, {"ran": float(self.ran)}


class AgentExecutor(TurnsExecutor):
    environment = Python
    stop = ("```\n",)  # keeps the end of a block, not its beginning
