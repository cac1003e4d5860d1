"""A run's models work, or are refused in one sentence before any engine starts."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.controller.step_costs import dense_shape
from openrlhf_gtpo.training.run import check, parse
from tests.support.command_lines import argv_of, table

pytestmark = pytest.mark.usefixtures("no_engine")


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_json", ".json")).write_text(text)
    return path


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_a_model_that_is_not_there_or_cannot_be_read(
    refused: Callable[..., str], tmp_path: Path, estimator: str
) -> None:
    """Whatever Transformers or the Hub say, the flag and the checkpoint are named."""
    flag, nothing = "--actor.model_name_or_path", "no-such-user/no-such-model"
    names = [None, tmp_path / "nowhere", nothing, folder(tmp_path / "empty")]
    names += [folder(tmp_path / "config", config_json='{"model_type": "llama"}')]
    for number, config in enumerate(("{", "[]", '{"model_type": "no_such_model"}', "{}")):
        names.append(folder(tmp_path / str(number), config_json=config))
        (names[-1] / "model.safetensors").touch()
    for name in names:
        message = refused({flag: name, "--algo.advantage.estimator": estimator})
        assert message.startswith(f"{flag} {name or 'is missing'}") and message.count(flag) == 1


def test_a_model_that_nobody_has_is_asked_for_without_retries(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx.Client, "send", fail)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the Hub is asked again"))
    message = refused({"--actor.model_name_or_path": "no-such-user/no-such-model"})
    assert message.endswith("cannot be read from the Hugging Face Hub or its cache: no network")


def test_each_file_is_read_once(
    command: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once as text, before anything is made of it, and once by Transformers."""
    import builtins

    read: list[str] = []
    plain = builtins.open

    def note(file: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(str(file))
        return plain(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", note)
    monkeypatch.setattr("io.open", note)
    for backend in ("deepspeed", "megatron"):
        read.clear()
        check(parse(argv_of(command | {"--actor.backend": backend, "--ckpt.path": tmp_path / "checkpoints"})))
        assert read.count(str(model / "config.json")) == 2, backend


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


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": {"a"'])
def test_a_model_whose_list_of_weights_cannot_be_read(
    refused: Callable[..., str], model: Path, tmp_path: Path, index: str
) -> None:
    path = copy_model(model, tmp_path / "indexed")
    (path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json cannot be read" in refused({"--actor.model_name_or_path": path})


def test_a_missing_shard(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "indexed")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "lacks gone.safetensors, which its" in refused({"--actor.model_name_or_path": path})


def test_a_model_without_a_tokenizer(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "mute", "tokenizer", "special_tokens")
    assert "its tokenizer cannot be read" in refused({"--actor.model_name_or_path": path})


def test_a_tokenizer_of_another_model(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "mixed")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 94}))
    message = refused({"--actor.model_name_or_path": path})
    assert "has embeddings for 94 tokens (vocab_size in its config.json), but its tokenizer has 95" in message


def test_weights_of_another_configuration(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    """Transformers makes up the weights of a missing layer, differently each time."""
    for change, message in (
        ({"num_hidden_layers": 2}, "lacks 9 of the weights that its config.json asks for, such as model.layers.1."),
        (
            {"intermediate_size": 32},
            "has shape (16, 16), but its config.json asks for (16, 32); give weights and config.json",
        ),
    ):
        path = copy_model(model, tmp_path / next(iter(change)))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | change))
        for flags in ({}, {"--algo.advantage.estimator": "group_norm"}):
            assert message in refused(flags | {"--actor.model_name_or_path": path})


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_tied_head_that_is_another(model: Path, tmp_path: Path, change: float) -> None:
    """Transformers would train it as it is; vLLM and Megatron would take the embedding."""
    path = copy_model(model, tmp_path / "tied")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + change
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    differs = r"lm_head.weight and model.embed_tokens.weight differ, but config.json ties them .*; set it to false."
    with pytest.raises(UsageError, match=differs) if change else nullcontext():
        Model(str(path), "--actor.model_name_or_path").check_weights()


def test_a_vision_language_model(
    command: dict[str, Any], refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    path = copy_model(model, tmp_path / "sees")
    (path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    assert "does not support images yet" in refused({"--actor.model_name_or_path": path})
    upstreams = {"--algo.advantage.estimator": "group_norm", "--actor.model_name_or_path": path}
    check(parse(argv_of(command | upstreams)))


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
@pytest.mark.parametrize("family", ["mixtral", "ernie4_5_moe"])
def test_experts_that_vllm_cannot_take(
    refused: Callable[..., str], model: Path, tmp_path: Path, family: str, estimator: str
) -> None:
    path = copy_model(model, tmp_path / family)
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    message = refused({"--actor.model_name_or_path": path, "--algo.advantage.estimator": estimator})
    assert f"vLLM can load the experts of '{family}' only from files" in message


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
    assert message.startswith(f"--actor.model_name_or_path {path} brings its own Python code (auto_map in its {file})")
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
    check(args)
    assert (tmp_path / "mark").exists()


def test_nobody_is_asked_on_the_terminal_whether_to_run_the_code(
    with_code: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers would ask if it knew no class of its own for the model, and wait 15 seconds for the answer."""
    path = with_code("config.json")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"model_type": "own"}))
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    with pytest.raises(UsageError, match=f"--actor.model_name_or_path {path}: "):
        Model(str(path), "--actor.model_name_or_path").check_weights()
    assert not (tmp_path / "mark").exists()


def test_code_of_every_model_that_is_named_is_looked_for(
    refused: Callable[..., str], with_code: Callable[[str], Path]
) -> None:
    path = with_code("config.json")
    reward = {"--reward.remote_url": None, "--reward.model_name_or_path": path}
    assert refused(reward).startswith(f"--reward.model_name_or_path {path} brings its own Python code")
    critic = {"--algo.advantage.estimator": "gae", "--critic.model_name_or_path": path}
    assert refused(critic).startswith(f"--critic.model_name_or_path {path} brings its own Python code")


def test_code_of_a_model_of_the_hub(
    refused: Callable[..., str], with_code: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cache" / "models--someone--coded"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    with_code("config.json").rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused({"--actor.model_name_or_path": "someone/coded"})
    assert message.startswith("--actor.model_name_or_path someone/coded brings its own Python code")
    assert not (tmp_path / "mark").exists()


def test_counting_a_models_work_runs_no_code_of_its_own(with_code: Callable[[str], Path], tmp_path: Path) -> None:
    path = with_code("config.json")
    known = dense_shape(str(path))
    assert known is not None and known.model_type == "llama"
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"model_type": "own"}))
    assert dense_shape(str(path)) is None
    assert not (tmp_path / "mark").exists()
