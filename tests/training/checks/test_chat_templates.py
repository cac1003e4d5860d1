"""Every command reads a question as training does, with templates like Qwen3's, Llama 3's and Gemma's."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AddedToken, AutoTokenizer

from openrlhf_gtpo.cli import ask, evaluate
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.scoring.answers import questions_of
from openrlhf_gtpo.scoring.inputs import RowFile
from openrlhf_gtpo.training.checks.model import Model, token_ids
from openrlhf_gtpo.training.run import check, parse
from openrlhf_gtpo.training.settings.prompts import keep_prompts, kept_prompts
from tests.support.command_lines import argv_of, table
from tests.training.checks.test_prompts import loaded

pytestmark = pytest.mark.usefixtures("no_engine")

# Thinking that is switched off by an empty thought, which an earlier turn does not keep; tools in the system message.
QWEN = """{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{%- if system or tools %}[S]{{ system }}{% for tool in tools or [] %}[T]{{ tool | tojson }}{% endfor %}[/]{% endif -%}
{%- for m in messages if m.role != "system" %}[{{ m.role }}]{{ m.content }}[/]{% endfor -%}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}()|{% endif %}
{%- endif -%}"""
# BOS, and today's date unless it is given.
LLAMA = """{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now("%d %b %Y") %}{% endif -%}
[S]Today: {{ date_string }}.{% if messages[0].role == "system" %}{{ messages[0].content | trim }}{% endif %}[/]
{%- for m in messages if m.role != "system" %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}"""
# No system message; the assistant is called model.
GEMMA = """{{- bos_token }}
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif -%}
{%- for m in messages %}<{{ "model" if m.role == "assistant" else m.role }}>{{ m.content | trim }}<.>{% endfor -%}
{%- if add_generation_prompt %}<model>{% endif -%}"""

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": None}}}]


@pytest.fixture
def chat(command: dict[str, Any], model: Path, tmp_path: Path) -> Any:
    """Makes a command line whose model has a template, and more flags."""

    def make(template: str, **flags: Any) -> dict[str, Any]:
        folder = tmp_path / "chat"
        shutil.copytree(model, folder, dirs_exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template, tokenizer.bos_token = template, "^"
        tokenizer.save_pretrained(folder)
        more = {f"--data.{name}": value for name, value in flags.items()}
        return command | {"--data.apply_chat_template": True, "--actor.model_name_or_path": folder} | more

    return make


def evaluated_prompts(command: dict[str, Any], path: Path, *more: str) -> tuple[list[str], Any]:
    """The prompts of an evaluation on ``path``, and the tokenizer."""
    trained = str(command["--actor.model_name_or_path"])
    words = ["--model", trained, "--output", "out", "--eval.dataset", str(path)]
    words += ["--eval.split", "train", "--data.input_key", "question", "--data.label_key", "answer"]
    words += ["--reward.remote_url", str(command["--reward.remote_url"]), *more]
    run, tokenizer, _ = evaluate.checked_inputs(
        evaluate.checked_flags(evaluate.build_parser().parse_args(words)), trained
    )
    return [prompt for prompt, _ in questions_of(run, tokenizer, str(path), "train")], tokenizer


@pytest.mark.parametrize(
    ("template", "flags", "expected"),
    [
        (QWEN, {}, "[user]a?[/][assistant]"),
        (QWEN, {"chat_template_kwargs": '{"enable_thinking": false}'}, "[user]a?[/][assistant]()|"),
        (QWEN, {"system_prompt": "Be brief."}, "[S]Be brief.[/][user]a?[/][assistant]"),
        (LLAMA, {"chat_template_kwargs": '{"date_string": "1 May"}'}, "^[S]Today: 1 May.[/][user]a?[/][assistant]"),
        (GEMMA, {}, "^<user>a?<.><model>"),
    ],
    ids=["Qwen", "Qwen without thinking", "Qwen with a system prompt", "Llama", "Gemma"],
)
def test_all_commands_read_the_same(
    chat: Any, tmp_path: Path, template: str, flags: dict[str, str], expected: str
) -> None:
    command = chat(template, **flags)
    path = table(tmp_path / "questions.jsonl", [{"question": "a?", "answer": "b"}])
    args = parse(argv_of(command | {"--data.prompt_dataset": path}))
    check(args)
    trained = Path(args.actor.model_name_or_path)
    keep_prompts(trained, args)
    checkpoint = Model(str(trained), "--model")
    ids = token_ids(checkpoint.tokenizer, expected)

    assert loaded(command, prompt_dataset=path).prompts == [expected]
    asked = ask.prompt_of(checkpoint, "a?", ask.prompts.NONE)
    [evaluated], tokenizer = evaluated_prompts(command, path)
    line = table(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "a?"}], "response": "b"}])
    [row] = RowFile(line, str(trained), 96, None).rows()
    assert [token_ids(tokenizer, asked), token_ids(tokenizer, evaluated), row.tokens[: row.first]] == [ids] * 3


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--data.max_len", "2049", "--data.max_len 2049 exceeds the 2048 positions of --model "),
        ("--eval.dataset", "{0},{0}", "two of them would be written to questions.jsonl."),
    ],
)
def test_what_an_evaluation_would_refuse_once_a_model_is_trained_is_refused_before(
    chat: Any, tmp_path: Path, flag: str, value: str, message: str
) -> None:
    path = table(tmp_path / "questions.jsonl", [{"question": "a?", "answer": "b"}])
    with pytest.raises(UsageError, match=message):
        evaluated_prompts(chat(QWEN), path, flag, value.format(path))


def test_what_a_flag_says_goes_before_what_the_run_used(chat: Any) -> None:
    args = parse(argv_of(chat(QWEN, chat_template_kwargs='{"enable_thinking": false}', system_prompt="Be brief.")))
    keep_prompts(Path(args.actor.model_name_or_path), args)
    checkpoint = Model(args.actor.model_name_or_path, "--model")
    given = ask.prompts.NONE | {"data.chat_template_kwargs": '{"enable_thinking": true}'}
    assert ask.prompt_of(checkpoint, "a?", given) == "[S]Be brief.[/][user]a?[/][assistant]"


def test_a_run_without_a_template_is_asked_without_one(chat: Any) -> None:
    args = parse(argv_of(chat(QWEN) | {"--data.apply_chat_template": None, "--data.input_template": "Q: {} A:"}))
    keep_prompts(Path(args.actor.model_name_or_path), args)
    checkpoint = Model(args.actor.model_name_or_path, "--model")
    assert ask.prompt_of(checkpoint, "a?", ask.prompts.NONE) == "Q: a? A:"


def test_rows_have_variables_and_tools_of_their_own(chat: Any, tmp_path: Path) -> None:
    """As JSON or as its text; what Arrow adds to the rows of a table is not printed."""
    command = chat(
        QWEN, chat_template_kwargs='{"enable_thinking": false}', chat_template_kwargs_key="chat", tools_key="tools"
    )
    rows = [
        {"question": "a", "answer": "b", "chat": {"enable_thinking": True}, "tools": TOOLS},
        {"question": "a", "answer": "b", "chat": '{"other": 1}', "tools": json.dumps(TOOLS)},
        {"question": "a", "answer": "b", "chat": None, "tools": []},
        {"question": "a", "answer": "b"},
    ]
    tools = '[S][T]{"type": "function", "function": {"name": "add", "parameters": {"a": null}}}[/]'
    expected = [f"{tools}[user]a[/][assistant]", f"{tools}[user]a[/][assistant]()|", *2 * ["[user]a[/][assistant]()|"]]
    long = {"--data.max_len": 512}
    prompts = loaded(command | long, prompt_dataset=table(tmp_path / "a.jsonl", rows))
    assert prompts.prompts == expected and prompts.variables == {  # for an agent's turns
        expected[0]: {"enable_thinking": True},
        expected[1]: {"enable_thinking": False, "other": 1},
    }
    structs = [{"enable_thinking": True, "other": None}, {"enable_thinking": None, "other": "1"}]
    columns = {"question": ["a", "a"], "answer": ["b", "b"], "chat": structs, "tools": [None, None]}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    assert loaded(command | long, prompt_dataset=tmp_path / "b.parquet").prompts == [
        "[user]a[/][assistant]",
        "[user]a[/][assistant]()|",
    ]


def test_a_data_set_may_lack_a_column_that_another_has(
    chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = chat(QWEN, tools_key="tools", chat_template_kwargs_key="chat") | {"--data.max_len": 512}
    row = {"question": "a", "answer": "b"}
    rich = table(tmp_path / "rich.jsonl", [row | {"tools": TOOLS, "chat": {"enable_thinking": False}}])
    plain = table(tmp_path / "plain.jsonl", [row])
    for name, held_out in ((rich, plain), (f"{plain},{rich}", rich)):
        check(args := parse(argv_of(command | {"--data.prompt_dataset": name, "--eval.dataset": held_out})))
        assert "plain.jsonl: no row has a column 'tools' (--data.tools_key)." in capsys.readouterr().err
    with pytest.raises(UsageError, match="no row has a column 'tools'"):
        check(parse(argv_of(command | {"--data.prompt_dataset": plain, "--eval.dataset": rich})))

    keep_prompts(Path(args.actor.model_name_or_path), args)
    assert evaluated_prompts(command, plain)[0] == ["[user]a[/][assistant]"]
    assert "no row has a column 'tools'" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no row has a column 'tools'"):
        evaluated_prompts(command, plain, "--data.tools_key", "tools")


def test_an_empty_text_takes_back_what_the_run_used(chat: Any, tmp_path: Path) -> None:
    flags = {"chat_template_kwargs": '{"enable_thinking": false}', "system_prompt": "Be brief."}
    command = chat(QWEN, **flags, chat_template_kwargs_key="chat", tools_key="tools")
    args = parse(argv_of(command))
    keep_prompts(Path(args.actor.model_name_or_path), args)
    row = {"question": "a", "answer": "b", "tools": TOOLS, "chat": {"enable_thinking": False}}
    path = table(tmp_path / "a.jsonl", [row])
    back = [word for flag in ask.prompts.NONE for word in (f"--{flag}", "")]
    assert evaluated_prompts(command, path, *back)[0] == ["[user]a[/][assistant]"]
    assert ask.prompt_of(
        Model(args.actor.model_name_or_path, "--model"), "a", dict.fromkeys(ask.prompts.NONE, "")
    ) == ("[user]a[/][assistant]")
    plain = dict.fromkeys((f"--{flag}" for flag in ask.prompts.NONE), "")
    assert loaded(command | plain, prompt_dataset=path).prompts == ["[user]a[/][assistant]"]


def test_a_row_keeps_its_own_system_message(chat: Any, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "a"}]
    path = table(tmp_path / "a.jsonl", [{"question": given, "answer": "b"} for given in (own, own[1:])])
    assert loaded(chat(QWEN, system_prompt="Be brief."), prompt_dataset=path).prompts == [
        "[S]Own.[/][user]a[/][assistant]",
        "[S]Be brief.[/][user]a[/][assistant]",
    ]


@pytest.mark.parametrize(
    ("template", "flags", "row", "why"),
    [
        (QWEN, {"chat_template_kwargs": "[1]"}, {}, "expected a JSON object"),
        (QWEN, {"chat_template_kwargs": "{enable"}, {}, "not JSON"),
        (QWEN, {"chat_template_kwargs": '{"tools": []}'}, {}, "--data.tools_key"),
        (QWEN, {"chat_template_kwargs_key": "chat"}, {"chat": "[1]"}, "--data.chat_template_kwargs_key"),
        (QWEN, {"chat_template_kwargs_key": "chat"}, {}, "no row has a column 'chat'"),
        (QWEN, {"tools_key": "tools"}, {"tools": ["add"]}, "not a list of JSON schemas"),
        (LLAMA, {"tools_key": "tools"}, {"tools": TOOLS}, "does not print tools"),
        (GEMMA, {"system_prompt": "Be brief."}, {}, "System role not supported"),
        (LLAMA.replace("messages[0].content", "''"), {"system_prompt": "Be brief."}, {}, "--data.system_prompt"),
    ],
)
def test_refused(
    chat: Any, tmp_path: Path, template: str, flags: dict[str, str], row: dict[str, Any], why: str
) -> None:
    path = table(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"} | row])
    with pytest.raises(UsageError, match=why):
        check(parse(argv_of(chat(template, **flags) | {"--data.prompt_dataset": path, "--data.max_len": 512})))


def notes(command: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    args = parse(argv_of(command | {"--data.max_len": 512}))
    capsys.readouterr()
    check(args)
    return capsys.readouterr().err


def test_one_look_before_the_start(chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("class AgentExecutor: pass\n")
    with_agent = {"--train.agent_func_path": agent, "--reward.remote_url": None}
    unread = {"chat_template_kwargs": '{"enable_thinking": false, "thinking": 1}'}
    shown = notes(chat(QWEN, **unread) | with_agent, capsys)
    assert "has 37 tokens, 59, 85, 83, 69, 82, 61, 55, 72 …" in shown and "0 BOS (^)" in shown
    assert "\n[user]What is 0 + 0?[/][assistant]()|\n" in shown
    assert "does not read thinking; setting it has no effect" in shown and "date" not in shown
    assert "a second turn" in shown  # the empty thought is not printed again
    assert "a second turn" not in notes(chat(QWEN) | with_agent, capsys)

    shown = notes(chat(LLAMA), capsys)
    assert "1 BOS (^)" in shown and "prints the date" in shown
    assert "prints the date" not in notes(chat(LLAMA, chat_template_kwargs='{"date_string": "1 May"}'), capsys)


def test_an_agent_whose_second_turn_a_template_refuses(chat: Any, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    template = GEMMA.replace('messages[0].role == "system"', 'messages[-1].role == "tool"').replace("System", "Tool")
    source = "from openrlhf_gtpo.training.rollout.turns import TurnsExecutor\nclass AgentExecutor(TurnsExecutor):\n"
    command = chat(template) | {"--train.agent_func_path": agent, "--reward.remote_url": None}
    agent.write_text(f"{source}    role = 'tool'\n")
    with pytest.raises(UsageError, match="a turn of tool: Tool role not supported. An agent that answers once has"):
        check(parse(argv_of(command)))
    for fine in ("role = 'user'", "role, turns = 'tool', 1"):
        agent.write_text(f"{source}    {fine}  # of another length, as Python's caches go by seconds and bytes\n")
        check(args := parse(argv_of(command)))
    keep_prompts(tmp_path, args)
    assert kept_prompts(tmp_path)["train.agent_func_path"] == str(agent)  # for cli.evaluate


def test_messages_with_the_letters_of_special_tokens_are_counted(
    chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = chat(GEMMA)
    tokenizer = AutoTokenizer.from_pretrained(command["--actor.model_name_or_path"])
    tokenizer.add_tokens([AddedToken("<.>", special=True)])  # GEMMA's end of a turn
    tokenizer.save_pretrained(command["--actor.model_name_or_path"])
    given: list[Any] = ["a", "a<.><model>b", [{"role": "user", "content": "<.>"}]]
    path = table(tmp_path / "a.jsonl", [{"question": one, "answer": "b"} for one in given])
    shown = notes(command | {"--data.prompt_dataset": path}, capsys)
    assert "the messages of 2 rows contain the text of a special token, such as <.> in row 2" in shown
    plain = table(tmp_path / "b.jsonl", [{"question": "a < b >", "answer": "b"}])
    assert "special tokens" not in notes(command | {"--data.prompt_dataset": plain}, capsys)


def test_bos_that_training_does_not_add_is_named(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers.processors import TemplateProcessing

    command = chat(GEMMA)
    folder = command["--actor.model_name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="^ $A", special_tokens=[("^", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    assert "BOS, but" not in notes(command, capsys)  # the template prints it
    plain = command | {"--data.apply_chat_template": None}
    assert "--data.input_template '^{}'" in notes(plain, capsys)
    assert "BOS, but" not in notes(plain | {"--data.input_template": "^{}"}, capsys)


def test_flags_without_a_template_are_named(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parse(argv_of(chat(QWEN, system_prompt="Be brief.") | {"--data.apply_chat_template": None}))
    assert "--data.system_prompt (needs --data.apply_chat_template)" in capsys.readouterr().err


def test_a_file_that_says_nothing_is_refused(chat: Any) -> None:
    folder = chat(QWEN)["--actor.model_name_or_path"]
    (folder / "prompts.json").write_text("{}")
    with pytest.raises(UsageError, match="prompts.json cannot be read"):
        ask.prompt_of(SimpleNamespace(folder=folder, tokenizer=None), "a?", ask.prompts.NONE)
