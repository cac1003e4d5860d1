"""A run's inputs (models, rewards, data) work, or are refused in one sentence before any engine starts."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import httpx
import pytest
from command_lines import ROWS, argv_of, table

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.checks import check_every_run, check_inputs
from openrlhf_gtpo.integration.command_line.input_checks import check_length, check_weights_fit
from openrlhf_gtpo.integration.controller.step_costs import dense_shape
from openrlhf_gtpo.integration.run import parse

pytestmark = pytest.mark.usefixtures("no_engine")

LINE = '{"question": "a", "answer": "b"}'


# ── The model ──


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_json", ".json")).write_text(text)
    return path


def test_a_model_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    flag = "--actor.model_name_or_path"
    for estimator in ("gtpo", "group_norm"):
        missing = refused({flag: None, "--algo.advantage.estimator": estimator})
        assert missing == f"{flag} is missing; give a Hugging Face checkpoint."
    assert refused({flag: tmp_path / "nowhere"}) == f"{flag} {tmp_path / 'nowhere'} does not exist."
    assert "HF_HUB_OFFLINE is set, and the cache" in refused({flag: "no-such-user/no-such-model"})
    assert "without config.json" in refused({flag: folder(tmp_path / "empty")})
    assert "no weights" in refused({flag: folder(tmp_path / "config", config_json='{"model_type": "llama"}')})


def test_a_model_that_nobody_has_is_asked_for_without_retries(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx.Client, "send", fail)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the Hub is asked again"))
    message = refused({"--actor.model_name_or_path": "no-such-user/no-such-model"})
    assert "the Hugging Face Hub cannot be reached (no network)" in message


@pytest.mark.parametrize(
    "config",
    ["{", "[]", '{"model_type": "no_such_model"}', "{}", '{"model_type": "qwen2", "num_hidden_layers": 2147483648}'],
)
def test_a_model_whose_configuration_cannot_be_read(refused: Callable[..., str], tmp_path: Path, config: str) -> None:
    path = folder(tmp_path / "broken", config_json=config, model_safetensors="")
    (path / "model_safetensors").rename(path / "model.safetensors")
    assert "is not a Hugging Face checkpoint that can be read" in refused({"--actor.model_name_or_path": path})


def copy_model(model: Path, path: Path, *without: str) -> Path:
    path.mkdir()
    for file in model.iterdir():
        if not file.name.startswith(without):
            (path / file.name).write_bytes(file.read_bytes())
    return path


def test_a_model_whose_weights_are_cut_off(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "short")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    message = refused({"--actor.model_name_or_path": path})
    assert "model.safetensors" in message and "cannot be read" in message


@pytest.mark.parametrize("index", ["", "null", "{}", '{"weight_map": "x"}', "[" * 100_000])
def test_a_model_whose_list_of_weights_cannot_be_read(
    refused: Callable[..., str], model: Path, tmp_path: Path, index: str
) -> None:
    path = copy_model(model, tmp_path / "indexed")
    (path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json cannot be read" in refused({"--actor.model_name_or_path": path})


def test_a_shard_of_a_name_that_no_file_can_have_is_missing(
    refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    path = copy_model(model, tmp_path / "indexed")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x\n" + "x" * 300}}))
    assert f"lacks x {'x' * 253}, which its" in refused({"--actor.model_name_or_path": path})


def test_a_model_without_a_tokenizer(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "mute", "tokenizer", "special_tokens")
    assert "has no tokenizer that can be read" in refused({"--actor.model_name_or_path": path})


def test_a_tokenizer_of_another_model(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "mixed")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 94}))
    message = refused({"--actor.model_name_or_path": path})
    assert "has embeddings for 94 tokens (vocab_size in its config.json), but its tokenizer has 95" in message


def test_a_chat_template_that_is_not_there(refused: Callable[..., str]) -> None:
    message = refused({"--data.apply_chat_template": True})
    assert message.startswith("--data.apply_chat_template: ") and "has no chat template; leave the flag out" in message


def test_weights_of_another_configuration(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    """Transformers makes up the weights of a missing layer, differently each time."""
    for change, message in (
        ({"num_hidden_layers": 2}, "lacks 9 of the weights that its config.json asks for, such as model.layers.1."),
        ({"intermediate_size": 32}, "is (16, 16), and its config.json asks for (16, 32); are weights and config.json"),
    ):
        path = copy_model(model, tmp_path / next(iter(change)))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | change))
        for flags in ({}, {"--algo.advantage.estimator": "group_norm"}):
            assert message in refused(flags | {"--actor.model_name_or_path": path})


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_a_length_beyond_the_models_positions(
    command: dict[str, Any], refused: Callable[..., str], model: Path, tmp_path: Path, estimator: str
) -> None:
    """vLLM would say so once Ray has started; what a scaled rotary embedding reaches is its business."""
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    longer = {"--algo.advantage.estimator": estimator, "--data.max_len": positions + 1}
    message = f"exceeds the {positions} positions of --actor.model_name_or_path {model} (max_position_embeddings)."
    assert refused(longer) == f"--data.max_len {positions + 1} {message}"
    scaled = copy_model(model, tmp_path / "scaled")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config = json.loads((model / "config.json").read_text()) | {"rope_parameters": rope}
    (scaled / "config.json").write_text(json.dumps(config))
    check_inputs(parse(argv_of(command | longer | {"--actor.model_name_or_path": scaled})))


def test_rotary_embeddings_of_several_kinds_of_layers_may_be_scaled() -> None:
    text = SimpleNamespace(max_position_embeddings=8, rope_parameters={"sliding": {"rope_type": "default"}})
    config = SimpleNamespace(get_text_config=lambda: text)
    with pytest.raises(UsageError, match="--data.max_len 9 exceeds the 8 positions of --model x"):
        check_length(config, 9, "--model x")
    text.rope_parameters["full"] = {"rope_type": "yarn", "factor": 4.0}
    check_length(config, 9, "--model x")


def test_a_vision_language_model(
    command: dict[str, Any], refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    path = copy_model(model, tmp_path / "sees")
    (path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    assert "is a vision-language model" in refused({"--actor.model_name_or_path": path})
    upstreams = {"--algo.advantage.estimator": "group_norm", "--actor.model_name_or_path": path}
    check_inputs(parse(argv_of(command | upstreams)))


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
@pytest.mark.parametrize("family", ["mixtral", "ernie4_5_moe"])
def test_experts_that_vllm_cannot_take(
    refused: Callable[..., str], model: Path, tmp_path: Path, family: str, estimator: str
) -> None:
    path = copy_model(model, tmp_path / family)
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    message = refused({"--actor.model_name_or_path": path, "--algo.advantage.estimator": estimator})
    assert f"vLLM cannot take the experts of '{family}' from training" in message


# ── A checkpoint with code of its own ──


@pytest.fixture
def with_code(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A copy of the model in which one configuration file names a class in a file that leaves a mark when imported."""

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def make(file: str) -> Path:
        path = copy_model(model, tmp_path / "with_code")
        mark = f"open({str(tmp_path / 'mark')!r}, 'w').close()\n"
        imports = "from transformers import LlamaConfig as C, PreTrainedTokenizerFast as T\n"
        (path / "own.py").write_text(f"{imports}{mark}class Config(C): ...\nclass Tokenizer(T): ...\n")
        named = {"AutoConfig": "own.Config"}
        if file == "tokenizer_config.json":
            named = {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}
        target = path / file
        fields = json.loads(target.read_text()) if target.exists() else {}
        target.write_text(json.dumps(fields | {"auto_map": named}))
        return path

    return make


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    "changes", [{}, {"--algo.advantage.estimator": "group_norm"}, {"--actor.backend": "megatron"}]
)
def test_code_of_a_checkpoint_is_not_run_unasked(
    refused: Callable[..., str], with_code: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], file: str
) -> None:
    path = with_code(file)
    message = refused({"--actor.model_name_or_path": path} | changes)
    assert message.startswith(
        f"--actor.model_name_or_path {path} brings Python code of its own (auto_map in its {file})"
    )
    assert "give --actor.trust_remote_code" in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_run_where_the_flag_is_given(
    command: dict[str, Any], with_code: Callable[[str], Path], tmp_path: Path, file: str
) -> None:
    trusted = {"--actor.model_name_or_path": with_code(file), "--actor.trust_remote_code": True}
    # A prompt with more bytes than there is room for has to be tokenized.
    rows = table(tmp_path / "long.jsonl", [{"question": "é" * 30, "answer": ""}])
    args = parse(argv_of(command | trusted | {"--data.prompt_dataset": rows}))
    check_every_run(args)
    check_inputs(args)
    assert (tmp_path / "mark").exists()


def test_nobody_is_asked_on_the_terminal_whether_to_run_the_code(
    with_code: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers would ask if it knew no class of its own for the model, and wait 15 seconds for the answer."""
    path = with_code("config.json")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"model_type": "own"}))
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    check_weights_fit(str(path), "--actor.model_name_or_path")
    assert not (tmp_path / "mark").exists()


def test_code_of_every_model_that_is_named_is_looked_for(
    refused: Callable[..., str], with_code: Callable[[str], Path]
) -> None:
    path = with_code("config.json")
    reward = {"--reward.remote_url": None, "--reward.model_name_or_path": path}
    assert refused(reward).startswith(f"--reward.model_name_or_path {path} brings Python code")
    critic = {"--algo.advantage.estimator": "gae", "--critic.model_name_or_path": path}
    assert refused(critic).startswith(f"--critic.model_name_or_path {path} brings Python code")


def test_code_of_a_model_of_the_hub(
    refused: Callable[..., str], with_code: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cache" / "models--someone--something"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    with_code("config.json").rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused({"--actor.model_name_or_path": "someone/something"})
    assert message.startswith("--actor.model_name_or_path someone/something brings Python code of its own")
    assert not (tmp_path / "mark").exists()


def test_counting_a_models_work_runs_no_code_of_its_own(with_code: Callable[[str], Path], tmp_path: Path) -> None:
    path = with_code("config.json")
    known = dense_shape(str(path))
    assert known is not None and known.model_type == "llama"
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"model_type": "own"}))
    assert dense_shape(str(path)) is None
    assert not (tmp_path / "mark").exists()


# ── The reward ──


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward_func(queries, prompts, labels:\n", "cannot be imported: SyntaxError"),
        ("import a_module_that_is_not_there\n", "cannot be imported: ModuleNotFoundError"),
        ("raise RuntimeError('no key')\n", "cannot be imported: RuntimeError: no key"),
        ("import sys\nsys.exit(3)\n", "cannot be imported: SystemExit: 3"),
        ("raise ValueError('two\\nlines')\n", "cannot be imported: ValueError: two lines"),
        ("def reward(queries, prompts, labels): ...\n", "defines no reward_func"),
        ("reward_func = 3\n", "defines no reward_func"),
        ("def reward_func(queries, prompts): ...\n", "which it does not take: too many positional arguments."),
        ("async def reward_func(queries, prompts, labels): ...\n", "OpenRLHF does not await reward_func"),
        ("def reward_func(q, p, labels, scale): ...\n", "does not take: missing a required argument: 'scale'."),
    ],
)
def test_a_reward_function_that_cannot_be_used(
    refused: Callable[..., str], tmp_path: Path, source: str, message: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    found = refused({"--reward.remote_url": path})
    assert found.startswith(f"--reward.remote_url {path}") and message in found


@pytest.mark.parametrize(
    "source",
    [
        "def reward_func(queries, prompts, labels, scale=1): ...\n",
        "def reward_func(*lists): ...\n",
        "class Reward:\n    def __call__(self, q, p, ls): ...\n\n\nreward_func = Reward()\n",
        "reward_func = max\n",
    ],
)
def test_a_reward_function_that_takes_three_lists(command: dict[str, Any], tmp_path: Path, source: str) -> None:
    (tmp_path / "reward.py").write_text(source)
    check_inputs(parse(argv_of(command)))


def test_a_reward_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused({"--reward.remote_url": tmp_path / "no.py"}).endswith("no.py does not exist.")
    assert refused({"--reward.remote_url": None}).startswith("There is no reward: give --reward.remote_url")
    assert "--reward.model_name_or_path" in refused(
        {"--reward.remote_url": None, "--reward.model_name_or_path": tmp_path / "no"}
    )


def test_several_reward_models_are_refused_as_openrlhf_loads_only_one(
    command: dict[str, Any], refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    """It takes the whole text as one name, so that a folder may have a comma in its name."""
    two = {"--reward.remote_url": None, "--reward.model_name_or_path": f"{model},{model}"}
    assert refused(two) == f"--reward.model_name_or_path {model},{model} does not exist."
    one = two | {"--reward.model_name_or_path": copy_model(model, tmp_path / "a,b")}
    check_inputs(parse(argv_of(command | one)))


def test_a_reward_server_that_does_not_answer(refused: Callable[..., str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]  # bound, but nobody listens
        url = f"http://127.0.0.1:{port}/get_reward"
        message = refused({"--reward.remote_url": url})
        assert message.startswith(f"--reward.remote_url {url}: no reward server answers there")
    assert "no reward server answers there" in refused({"--reward.remote_url": "http://127.0.0.1:99999/"})


def test_a_reward_that_is_no_python_file(refused: Callable[..., str], tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    assert refused({"--reward.remote_url": data}).startswith(
        f"--reward.remote_url {data} is not a .py file; give a Python"
    )
    assert "is a folder; give a Python file" in refused({"--reward.remote_url": tmp_path})
    assert refused({"--reward.remote_url": "localhost:5000/get_reward"}) == (
        "Expected --reward.remote_url to be a .py file or to begin with http://, got localhost:5000/get_reward."
    )


def test_several_rewards_are_servers(refused: Callable[..., str], tmp_path: Path) -> None:
    files = f"{tmp_path / 'reward.py'},{tmp_path / 'reward.py'}"
    assert refused({"--reward.remote_url": files}) == (
        f"--reward.remote_url {files}: servers take turns, but OpenRLHF calls only one Python file; give one."
    )


def test_an_agent_that_cannot_be_used(refused: Callable[..., str], tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    assert "does not exist" in refused({"--train.agent_func_path": agent})
    agent.write_text("class Agent: ...\n")
    assert "defines no AgentExecutor" in refused({"--train.agent_func_path": agent})
    text = agent.rename(tmp_path / "agent.txt")
    assert refused({"--train.agent_func_path": text}) == (
        f"--train.agent_func_path {text} is not a .py file; give a Python file with AgentExecutor."
    )


# ── The data ──


@pytest.fixture(params=["--data.prompt_dataset", "--eval.dataset"])
def data_flag(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_data_set_that_is_not_there(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    for name in ("no.jsonl", "no_folder"):
        assert refused({data_flag: tmp_path / name}) == f"{data_flag} {tmp_path / name} does not exist."
    assert refused({data_flag: "./no_folder"}) == f"{data_flag} ./no_folder does not exist."


def test_no_data_set(refused: Callable[..., str]) -> None:
    assert refused({"--data.prompt_dataset": None}) == "--data.prompt_dataset is missing; give a data set."


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", ""),
        ("header.csv", "question,answer\n", "has no rows"),
        ("null.jsonl", "null\n", "row 1 is null; drop it"),
        ("later.jsonl", '{"question": "a", "answer": "b"}\nnull\n', "row 2 is null; drop it"),
        ("list.json", '[\n null, {"question": "a", "answer": "b"}]', "row 1 is null; drop it"),
        (
            "broken.jsonl",
            '{"question": "a", "answer": \n',
            ": line 1 is not a JSON object (Expecting value); give one row per line.",
        ),
        (
            "python.jsonl",
            f"{LINE}\n\n{{'question': 'x'}}\n{LINE}",
            ": line 3 is not a JSON object (Expecting property name enclosed in double quotes);",
        ),
        ("brace.jsonl", f"{LINE[:-1]}\n{LINE}\n", ": line 1 is not a JSON object (Expecting ',' delimiter)"),
        ("commas.jsonl", f"{LINE},\n{LINE},\n", ": line 1 is not a JSON object (Extra data)"),
        ("lists.jsonl", f"{LINE}\n" + '["a", "b"]\n' * 2, ": line 2 is not a JSON object;"),
        ("only_lists.jsonl", '["a", "b"]\n["c", "d"]\n', ": line 1 is not a JSON object;"),
        ("texts.jsonl", '"a"\n"b"\n', ": line 1 is not a JSON object;"),
        ("deep.jsonl", f"{LINE}\n" + "[" * 100_000, ": line 2 is not a JSON object (maximum recursion depth"),
        ("utf16.jsonl", "\xff\xfe{\0}\0\n\0", ": line 1 is not in UTF-8; convert the file, for example with iconv."),
        ("byte.jsonl", f"{LINE}\n{{'question': 'caf\xe9'}}\n", ": line 2 is not in UTF-8;"),
        ("comma.json", f"[\n  {LINE},\n  {LINE}\n  {LINE}\n]", ": line 4 is not JSON (Expecting ',' delimiter)."),
        ("numbers.json", f"[\n{LINE},\n2]", "cannot be read as json: "),
        ("text.parquet", "this is no parquet file", "cannot be read as parquet"),
        ("text.arrow", "this is no arrow file", "cannot be read as arrow"),
        ("script.py", "import os\n", " is not one of .json, .jsonl, .csv, .parquet, .arrow; convert or rename it."),
        ("rows.txt", LINE, " is not one of .json, .jsonl,"),
        ("rows", LINE, " is not one of .json, .jsonl,"),
        (
            "latin.jsonl",
            '{"question": "caf\xe9", "answer": "a"}\n',
            "is not in UTF-8 ('utf-8' codec can't decode byte",
        ),
        ("latin.csv", "question,answer\ncaf\xe9,a\n", "cannot be read as csv: 'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_a_data_set_that_cannot_be_read(
    refused: Callable[..., str], data_flag: str, tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    found = refused({data_flag: path})
    assert found.startswith(f"{data_flag} {path}") and message in found


def test_a_folder_of_data(
    refused: Callable[..., str], command: dict[str, Any], data_flag: str, tmp_path: Path
) -> None:
    """An empty folder is refused; the contents of a folder of files, or of one saved by datasets, are checked."""
    empty = folder(tmp_path / "empty")
    assert refused({data_flag: empty}).startswith(f"{data_flag} {empty} cannot be read as a data set: ")
    files, saved = folder(tmp_path / "files"), tmp_path / "saved"
    rows = table(files / "train.jsonl", ROWS)
    check_inputs(parse(argv_of(command | {data_flag: files})))
    datasets.Dataset.from_list(ROWS).save_to_disk(saved)
    check_inputs(parse(argv_of(command | {data_flag: saved})))
    splits = tmp_path / "splits"
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(splits)
    split = data_flag.replace("_dataset", "_split").replace(".dataset", ".split")
    assert refused({data_flag: splits, split: "test"}).endswith(f"no split 'test' ({split}); it has train.")
    table(rows, [{"text": "a"}])
    assert "has no column 'question'" in refused({data_flag: files})
    rows.write_text("null\n")
    assert refused({data_flag: files}) == f"{data_flag} {rows}: row 1 is null; drop it."


def test_a_data_set_without_the_columns(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    path = table(tmp_path / "other.jsonl", [{"text": "a", "answer": "b"}])
    assert refused({data_flag: path}).endswith("has no column 'question' (--data.input_key); it has text, answer.")
    path = table(tmp_path / "more.jsonl", [{"question": "a"}])
    assert refused({data_flag: path}).endswith("has no column 'answer' (--data.label_key); it has question.")
    path = table(tmp_path / "odd.jsonl", [{"a\nb": "a"}])
    assert refused({data_flag: path}).endswith("it has a b.")
    path = table(tmp_path / "nul.jsonl", [{"question": {"a\0b": "a", "c": [1, "d"]}, "answer": "b"}])
    assert "has a column with a name in it that cannot be read: 'a\\x00b'." in refused({data_flag: path})


def test_a_data_set_without_the_split(refused: Callable[..., str]) -> None:
    assert "has no split 'test' (--data.prompt_split)" in refused({"--data.prompt_split": "test"})


def test_a_list_of_rows(command: dict[str, Any], data_flag: str, tmp_path: Path) -> None:
    for name, indent in (("line.json", None), ("lines.json", 2), ("list.jsonl", 2)):
        (tmp_path / name).write_text(json.dumps(ROWS, indent=indent))
        check_inputs(parse(argv_of(command | {data_flag: tmp_path / name})))


@pytest.mark.parametrize("content", [7, ["a"]])
def test_a_prompt_that_is_no_text(
    refused: Callable[..., str], model: Path, data_flag: str, tmp_path: Path, content: Any
) -> None:
    path = table(tmp_path / "odd.jsonl", [{"question": content, "answer": "b"}])
    wrong = f"{data_flag} {path}: the prompt of row 1 is {content}, not text"
    assert refused({data_flag: path}) == f"{wrong}."
    chat = {"--data.apply_chat_template": True, "--actor.model_name_or_path": chat_model(model, tmp_path / "chat")}
    assert refused(chat | {data_flag: path}) == f"{wrong} or a list of messages."
    mixed = table(tmp_path / "mixed.jsonl", [*ROWS, {"question": content, "answer": "b"}])
    assert ": the prompt of row 5 is " in refused(chat | {data_flag: mixed})


def test_prompts_may_be_texts_and_messages(command: dict[str, Any], model: Path, tmp_path: Path) -> None:
    chat = {"--data.apply_chat_template": True, "--actor.model_name_or_path": chat_model(model, tmp_path / "chat")}
    named = {"role": "user", "content": "a", "name": "b"}
    prompts: list[Any] = ["a", [{"role": "user", "content": "a"}], [named, {"role": "user", "content": "a"}]]
    path = table(tmp_path / "chats.jsonl", [{"question": prompt, "answer": "b"} for prompt in prompts])
    check_inputs(parse(argv_of(command | chat | {"--data.prompt_dataset": path})))


def chat_model(model: Path, path: Path) -> Path:
    copy_model(model, path)
    (path / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return path


@pytest.mark.parametrize("odd", [7, 7.5, True, ["7", 7], {"is": "7"}])
def test_labels_of_different_types(refused: Callable[..., str], data_flag: str, tmp_path: Path, odd: Any) -> None:
    """One number among texts, and datasets 5.2 makes a number of each text that looks like one."""
    path = table(tmp_path / "labels.jsonl", [*ROWS, {"question": "a", "answer": odd}])
    assert refused({data_flag: path}) == (
        f"{data_flag} {path}: labels ('answer' of --data.label_key) have different types, which would turn text such "
        'as "3" into numbers; write all of them as text.'
    )


@pytest.mark.parametrize("labels", [[1, 2], [1, 2.5], [{"is": "1"}, {"or": "2"}], [["1"], ["1", "2"]]])
def test_labels_need_not_be_text(command: dict[str, Any], data_flag: str, tmp_path: Path, labels: list[Any]) -> None:
    path = table(tmp_path / "labels.jsonl", [{"question": "a", "answer": label} for label in labels])
    check_inputs(parse(argv_of(command | {data_flag: path})))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "", "answer": "b"}, "the prompt of row 5 is empty; drop that row."),
        (
            {"question": None, "answer": "b"},
            "row 5 has no prompt ('question' of --data.input_key is null); drop that row.",
        ),
        (
            {"question": "a", "answer": None},
            "row 5 has no label ('answer' of --data.label_key is null); drop that row.",
        ),
    ],
)
def test_a_row_with_a_gap(
    refused: Callable[..., str], data_flag: str, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = table(tmp_path / "gap.jsonl", [*ROWS, row])
    assert refused({data_flag: path}).startswith(f"{data_flag} {path}: {message}")


def test_a_prompt_that_does_not_fit(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    path = table(tmp_path / "long.jsonl", [*ROWS, {"question": "x" * 49, "answer": ""}])
    said = f"{data_flag} {path}: the prompt of row 5 has 49 tokens, but"
    assert refused({data_flag: path}).startswith(
        f"{said} --data.max_len 64 with --rollout.max_new_tokens 16 leaves 48; "
    )
    unlimited = {data_flag: path, "--rollout.max_new_tokens": None, "--data.max_len": 49}
    assert refused(unlimited) == f"{said} --data.max_len 49 leaves 48; raise --data.max_len or drop it."


def test_a_prompt_that_just_fits(command: dict[str, Any], tmp_path: Path) -> None:
    path = table(tmp_path / "fits.jsonl", [{"question": "x" * 48, "answer": ""}])
    check_inputs(parse(argv_of(command | {"--data.prompt_dataset": path})))


def test_every_one_of_several_data_sets_is_looked_at(refused: Callable[..., str], tmp_path: Path) -> None:
    good = table(tmp_path / "good.jsonl", ROWS)
    assert refused({"--data.prompt_dataset": f"{good},{tmp_path}/no.jsonl"}).endswith("no.jsonl does not exist.")


def test_data_sets_that_cannot_be_blended(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    words, numbers = table(tmp_path / "words.jsonl", ROWS), tmp_path / "numbers.jsonl"
    table(numbers, [row | {"answer": int(row["answer"])} for row in ROWS])
    found = refused({data_flag: f"{words},{numbers}"})
    assert found.startswith(f"{data_flag} {words},{numbers}: a column has different types in them (The features can't")
    assert "key answer" in found and found.endswith("; convert or drop it.")


@pytest.mark.parametrize("probs", ["0.5", "0.5,0.4", "1.5,-0.5", "half,half", ""])
def test_every_data_set_has_its_probability(
    refused: Callable[..., str], command: dict[str, Any], tmp_path: Path, probs: str
) -> None:
    good = table(tmp_path / "good.jsonl", ROWS)
    both = {"--data.prompt_dataset": f"{good},{good}"}
    assert refused(both | {"--data.prompt_probs": probs}) == (
        "Expected --data.prompt_probs to be 2 probabilities that add up to 1, one for each data set of "
        f"--data.prompt_dataset, got {probs}."
    )
    check_inputs(parse(argv_of(command | both | {"--data.prompt_probs": "0.3,0.7"})))
