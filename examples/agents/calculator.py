"""An agent with a calculator: `--train.agent_func_path examples/agents/calculator.py`, on the quickstart's products.

The policy may ask "calculate: 12 * 7" and gets the result. A response without a question ends the conversation, and
its last number is compared with the label. Use `--data.label_key label` with files of `cli.prepare task`.
"""

import ast
import operator
import re

from openrlhf_gtpo.training.rollout.turns import Environment, TurnsExecutor

ASKED = re.compile(r"calculate:\s*([^\n]+)", re.IGNORECASE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(expression: str) -> float:
    """Evaluate numbers with + - * / and brackets; raise ValueError for anything else."""

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        raise ValueError("only numbers, + - * / and brackets")

    try:
        return of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


class Calculator(Environment):
    answer, asked = "", 0

    async def reply(self, text: str) -> str | None:
        self.answer = text
        found = ASKED.search(text)
        if found is None:
            return None
        self.asked += 1
        try:
            return f"The result is {value(found[1]):.15g}."
        except ValueError as error:
            return f"That cannot be calculated: {error}."

    async def score(self) -> tuple[float, dict[str, float | str]]:
        numbers = NUMBER.findall(self.answer)
        reward = float(bool(numbers) and ASKED.search(self.answer) is None and numbers[-1] == str(self.label))
        return reward, {"asked": float(self.asked)}


class AgentExecutor(TurnsExecutor):
    environment = Calculator
