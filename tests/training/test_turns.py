"""Conversations: what the policy sampled is its actions, and nothing else has credit, wherever it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.checks.reward import import_file
from openrlhf_gtpo.training.rollout.turns import Environment, TurnsExecutor, between_turns
from openrlhf_gtpo.training.rows import Row
from tests.support import ROOT

CHAT = """{% for m in messages %}<s>{{ m.role }}
{{ m.content }}<e>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token per character, and one for each of <s> and <e>."""
    vocabulary = {chr(code): code for code in range(128)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="~", pad_token="~", eos_token="<e>")
    made.add_special_tokens({"additional_special_tokens": ["<s>"]})
    made.chat_template = CHAT
    return made


class Engine:
    """Answers with the next of ``texts``; one ends at a length, the others with their text."""

    def __init__(self, tokenizer: Any, *texts: str, cut: int | None = None) -> None:
        self.texts, self.tokenizer, self.cut = list(texts), tokenizer, cut
        self.asked: list[tuple[str, Any]] = []

    async def generate(self, tokens: list[int], params: Any) -> Any:
        self.asked.append((self.tokenizer.decode(tokens), params))
        ids = self.tokenizer(self.texts[len(self.asked) - 1], add_special_tokens=False)["input_ids"]
        short = ids[: params.max_tokens]
        is_cut = len(short) < len(ids) or self.cut == len(self.asked)
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in short]
        answer = SimpleNamespace(token_ids=short, logprobs=logprobs, finish_reason="length" if is_cut else "stop")
        return SimpleNamespace(outputs=[answer])


class Echo(Environment):
    """Repeats what was said until that is "end"."""

    closed = 0

    async def reply(self, text: str) -> str | None:
        return None if text == "end" else f"You said {text}."

    async def score(self) -> tuple[float, dict[str, float | str]]:
        return 0.5, {"kind": "echo"}

    async def close(self) -> None:
        Echo.closed += 1


class Talk(TurnsExecutor):
    environment = Echo
    turns = 3


def talk(tokenizer: Any, engine: Engine, max_len: int = 400, turn: int | None = 50, executor: Any = Talk) -> Row:
    params = SimpleNamespace(max_tokens=turn, logprobs=0, stop=None)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    response = asyncio.run(executor().execute(prompt, "l", params, max_len, tokenizer, engine))
    return Row.of_response(response, 0, max_len, len(tokenizer))


def text_of(tokenizer: Any, row: Row, actions: bool) -> str:
    return tokenizer.decode(row.tokens[row.mask == actions])


def test_only_what_was_sampled_is_an_action(tokenizer: Any) -> None:
    engine = Engine(tokenizer, "a b<e>", "end<e>")
    row = talk(tokenizer, engine)
    messages = [("user", "Hi"), ("assistant", "a b"), ("user", "You said a b."), ("assistant", "end")]
    chat = [{"role": role, "content": content} for role, content in messages]
    assert tokenizer.decode(row.tokens) + "\n" == tokenizer.apply_chat_template(chat, tokenize=False)
    assert text_of(tokenizer, row, True) == "a b<e>end<e>"
    assert "\n<s>user\nYou said a b.<e>\n<s>assistant\n" in text_of(tokenizer, row, False)
    assert row.num_actions == 8 and row.logs == {"turns": 2.0} and row.texts == {"kind": "echo"}
    assert row.log_probs is not None and row.log_probs.tolist() == [-0.5 if action else 0.0 for action in row.mask]
    assert not row.truncated and row.reward == 0.5


def test_a_turn_that_a_stop_text_ends_is_closed_by_the_template(tokenizer: Any) -> None:
    row = talk(
        tokenizer,
        engine := Engine(tokenizer, "a```\n", "end<e>"),
        executor=type("Stop", (Talk,), {"stop": ("```\n",)}),
    )
    assert text_of(tokenizer, row, True) == "a```\nend<e>"
    assert "assistant\na```\n<e>\n<s>user\nYou said a```\n.<e>\n<s>assistant\nend<e>" in tokenizer.decode(row.tokens)
    assert engine.asked[0][1].stop == ["```\n"] and engine.asked[0][1].include_stop_str_in_output


def test_turns_are_counted_and_limited(tokenizer: Any) -> None:
    engine = Engine(tokenizer, *["a<e>"] * 9)
    row = talk(tokenizer, engine, turn=7)
    assert row.logs["turns"] == 3 and not row.truncated and len(engine.asked) == 3
    assert [params.max_tokens for _, params in engine.asked] == [7, 7, 7]
    assert talk(tokenizer, Engine(tokenizer, "end<e>"), turn=None).num_actions == 4


@pytest.mark.parametrize(
    ("texts", "max_len", "turn", "cut", "actions"),
    [
        (("a<e>", "b" * 9), 400, 5, None, "a<e>bbbbb"),  # by a turn's own limit
        (("a<e>", "bb<e>"), 400, 50, 2, "a<e>bb<e>"),  # by the engine
        (("a<e>", "b" * 90), 76, 50, None, "a<e>" + "b" * 22),  # the context is full within the second turn
        (("a<e>", "bb<e>"), 54, 50, None, "a<e>"),  # there is no room for the environment's answer
    ],
)
def test_a_later_turn_may_be_cut_off(
    tokenizer: Any, texts: tuple[str, ...], max_len: int, turn: int, cut: int | None, actions: str
) -> None:
    closed = Echo.closed
    row = talk(tokenizer, Engine(tokenizer, *texts, cut=cut), max_len, turn)
    assert row.truncated and len(row.tokens) <= max_len and row.reward == 0.5
    assert text_of(tokenizer, row, True) == actions and row.mask[-1]
    assert Echo.closed == closed + 1


def test_the_environments_tokens_have_no_part_in_credit(tokenizer: Any) -> None:
    """Whatever their entropies are, advantages are those of the actions alone."""
    rows = [
        talk(tokenizer, Engine(tokenizer, *texts)) for texts in (("a b<e>", "end<e>"), ("cc<e>", "d<e>", "end<e>"))
    ]
    width = max(len(row.tokens) for row in rows) - 1
    mask = torch.zeros(2, width, dtype=torch.bool)
    for place, row in enumerate(rows):
        mask[place, : len(row.mask) - 1] = torch.from_numpy(row.mask[1:])
    entropy = torch.rand(2, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outcome, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    advantages = gtpo_advantages(entropy, mask, outcome, groups, GTPOConfig())
    longest = int(mask.sum(dim=-1).max())
    alone, short = torch.zeros(2, longest, dtype=torch.float64), torch.zeros(2, longest, dtype=torch.bool)
    for place in range(2):
        count = int(mask[place].sum())
        alone[place, :count], short[place, :count] = entropy[place][mask[place]], True
    expected = gtpo_advantages(alone, short, outcome, groups, GTPOConfig())
    torch.testing.assert_close(advantages[mask], expected[short])
    assert not advantages[~mask].any()
    again = gtpo_advantages(entropy.masked_fill(~mask, 1e9), mask, outcome, groups, GTPOConfig())
    assert torch.equal(again, advantages)


def test_a_template_without_such_a_turn_is_refused(tokenizer: Any) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UsageError, match="does not print the assistant's turn and that of tool once each"):
        between_turns(other, "tool")
    other.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UsageError, match="does not print a turn of tool: no"):
        between_turns(other, "tool")


AGENTS = ROOT / "examples" / "agents"


def played(name: str, *said: str, label: str = "84") -> tuple[list[str | None], float]:
    """An agent file's replies to ``said``, and its reward."""
    agent: Any = import_file(str(AGENTS / name), "--train.agent_func_path", "AgentExecutor")
    environment = agent.environment("prompt", label)

    async def play() -> tuple[list[str | None], float]:
        return [await environment.reply(text) for text in said], (await environment.score())[0]

    return asyncio.run(play())


def test_the_calculator_computes_and_pays_for_an_answer() -> None:
    assert played("calculator.py", "calculate: 12 * 7", "It is 84.") == (["The result is 84.", None], 1.0)
    assert played("calculator.py", "calculate: 12 * 7") == (["The result is 84."], 0.0)
    replies, reward = played("calculator.py", "calculate: __import__('os')", "calculate: 1/0", "calculate: 9**9", "83")
    assert all(str(reply).startswith("That cannot be calculated") for reply in replies[:3]) and reward == 0.0


def test_the_python_tool_runs_a_block() -> None:
    from openrlhf_gtpo.tasks.sandbox import why_no_sandbox

    if why := why_no_sandbox():
        pytest.skip(why)
    said = "```python\nprint(12 * 7)\n```\n", "```python\npass\n```\n", "84"
    assert played("python_tool.py", *said) == (["84", "It printed nothing.", None], 1.0)
