"""Every mistake of the user's is one sentence before any engine starts, and what works is not refused."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from command_lines import argv_of

from openrlhf_gtpo.cli import train_ppo_ray
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.checks import check_every_run, check_inputs
from openrlhf_gtpo.integration.command_line.input_checks import check_metrics_file
from openrlhf_gtpo.integration.controller.step_costs import dense_shape
from openrlhf_gtpo.integration.run import parse
from openrlhf_gtpo.report.metrics import MetricsWriter

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0] * len(queries)}\n"
ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]


pytestmark = pytest.mark.usefixtures("no_engine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of one token a character and no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=" ", pad_token=" ", eos_token="~").save_pretrained(
        directory
    )
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def command(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A command line that passes every check; a test breaks one thing of it. None leaves a flag out."""
    (tmp_path / "reward.py").write_text(REWARD)
    table(tmp_path / "train.jsonl", ROWS)
    return {
        "--algo.advantage.estimator": "gtpo",
        "--actor.model_name_or_path": model,
        "--actor.num_gpus_per_node": 1,
        "--vllm.num_engines": 1,
        "--reward.remote_url": tmp_path / "reward.py",
        "--data.prompt_dataset": tmp_path / "train.jsonl",
        "--data.input_key": "question",
        "--data.label_key": "answer",
        "--data.max_len": 64,
        "--rollout.max_new_tokens": 16,
        "--rollout.n_samples_per_prompt": 4,
    }


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_line_of_these_tests_is_good(command: dict[str, Any]) -> None:
    for estimator in ("gtpo", "grpo_s"):
        check_inputs(parse(argv_of(command | {"--algo.advantage.estimator": estimator})))


def test_upstreams_estimators_are_not_held_to_our_rules(command: dict[str, Any]) -> None:
    broken = {"--data.prompt_dataset": "/nowhere.jsonl", "--actor.model_name_or_path": "/nowhere"}
    check_inputs(parse(argv_of(command | broken | {"--algo.advantage.estimator": "group_norm"})))


# ── The command line itself ──


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--rollout.n_samples_per_prompt": 1},
            "Expected --rollout.n_samples_per_prompt >= 2, which gtpo compares, got 1.",
        ),
        ({"--rollout.n_samples_per_prompt": None}, "n_samples_per_prompt >= 2, which gtpo compares, got 1."),
        ({"--actor.loss_agg_mode": "seq-mean-token-mean"}, "--actor.loss_agg_mode seq-mean-token-mean does not fit"),
        ({"--algo.advantage.estimator": "grpo_s", "--actor.loss_agg_mode": "token-mean"}, "does not fit"),
        ({"--actor.policy_loss_type": "gspo"}, "--actor.policy_loss_type gspo does not fit"),
        (
            {"--algo.gtpo.variant": "v2", "--algo.gtpo.alpha1": 0.5, "--algo.gtpo.kappa": 4},
            "alpha1 + alpha1/kappa = 0.625 < 1",
        ),
        ({"--algo.gtpo.varient": "v1"}, "unknown flag --algo.gtpo.varient; did you mean --algo.gtpo.variant?"),
        ({"--algo.gtpo.variant": "v9"}, "invalid choice: 'v9'"),
        ({"--train.seed": "one"}, "argument --train.seed: invalid int value: 'one'"),
        ({"--vllm.num_engines": None, "--ds.packing_samples": True}, "OpenRLHF cannot work with these arguments"),
        (
            {"--vllm.sync_checksum": True, "--vllm.sync_with_ray": True},
            "--vllm.sync_checksum does not go with --vllm.sync_with_ray",
        ),
        (
            {"--vllm.sync_checksum": True, "--actor.freeze_visual_encoder": True},
            "--vllm.sync_checksum does not go with --actor.freeze_visual_encoder",
        ),
        ({"--train.async_enable": True}, "--train.async_enable does not go with"),
        ({"--data.max_images_per_prompt": 1}, "--data.max_images_per_prompt 1 does not go with"),
        (
            {"--reward.overlong_buffer_len": 16},
            "Expected 0 < --reward.overlong_buffer_len < 16 tokens, got 16.",
        ),
        (
            {"--reward.overlong_buffer_len": 8, "--rollout.max_new_tokens": None},
            "--reward.overlong_buffer_len 8 counts back from the longest response",
        ),
        ({"--rollout.top_p": 0.9}, "--rollout.top_p 0.9 does not go with --algo.advantage.estimator gtpo"),
        (
            {"--reward.overlong_buffer_len": -1},
            "Expected 0 < --reward.overlong_buffer_len < 16 tokens, got -1.",
        ),
        (
            {"--rollout.max_new_tokens": 64},
            "Expected --rollout.max_new_tokens < --data.max_len 64, for a prompt to fit, got 64.",
        ),
        ({"--actor.dual_clip": 0.5}, "dual_clip must be > 1.0, got 0.5"),
        ({"--rollout.temperature": 0}, "Expected --rollout.temperature > 0, got 0."),
        ({"--algo.preset": "dapo"}, "--algo.preset dapo brings its own estimator"),
        (
            {"--algo.advantage.is_correction_level": "seq", "--algo.advantage.is_correction_mode": "clip"},
            "is_correction_mode=clip requires",
        ),
    ],
    ids=str,
)
def test_a_contradiction_in_the_command_line(
    refused: Callable[..., str], changes: dict[str, Any], message: str
) -> None:
    assert message in refused(changes)


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--ds.lora.rank": 8}, "--ds.lora.rank 8 wraps the weights, and vLLM does not know"),
        ({"--ds.load_in_4bit": True}, "--ds.load_in_4bit packs the weights"),
        ({"--vllm.num_engines": 0}, "Expected --vllm.num_engines >= 1 to sample from, got 0."),
        ({"--vllm.num_engines": -1}, "Expected --vllm.num_engines >= 1 to sample from, got -1."),
        ({"--vllm.num_engines": None}, "Expected --vllm.num_engines >= 1 to sample from, got None."),
        ({"--reward.remote_url": None}, "There is no reward: give --reward.remote_url FILE.py (a reward function)"),
        ({"--train.num_episodes": 0}, "Expected --train.num_episodes >= 1, got 0."),
        ({"--rollout.micro_batch_size": 0}, "Expected --rollout.micro_batch_size >= 1, got 0."),
        ({"--data.max_samples": -1}, "Expected --data.max_samples >= 1, got -1."),
        ({"--actor.num_gpus_per_node": -2}, "Expected --actor.num_gpus_per_node >= 1, got -2."),
        ({"--ref.num_nodes": 0}, "Expected --ref.num_nodes >= 1, got 0."),
        ({"--data.max_len": 1}, "Expected --data.max_len >= 2, for a prompt and a response, got 1."),
        ({"--eval.steps": -2}, "Expected --eval.steps >= 1, or -1 for never, got -2."),
        ({"--ckpt.save_steps": 0}, "Expected --ckpt.save_steps >= 1, or -1 for never, got 0."),
        ({"--actor.eps_clip_low_high": [0.5, -0.2]}, "Expected --actor.eps_clip_low_high >= 0, got 0.5 -0.2."),
        ({"--actor.eps_clip": "nan"}, "Expected --actor.eps_clip >= 0, got nan."),
        ({"--algo.kl.init_coef": "inf"}, "Expected a finite --algo.kl.init_coef >= 0, got inf."),
        ({"--actor.adam.lr": -1}, "Expected 0 <= --actor.adam.lr <= 1, got -1."),
        ({"--actor.adam.lr": "nan"}, "Expected 0 <= --actor.adam.lr <= 1, got nan."),
        ({"--actor.adam.lr": "1e30"}, "Expected 0 <= --actor.adam.lr <= 1, got 1e+30."),
        ({"--actor.adam.betas": [0.9, 1]}, "Expected 0 <= --actor.adam.betas < 1, got 0.9 1."),
        ({"--vllm.gpu_memory_utilization": 7}, "Expected 0 < --vllm.gpu_memory_utilization <= 1, got 7."),
        ({"--rollout.top_p": 0}, "Expected 0 < --rollout.top_p <= 1, got 0."),
        ({"--eval.temperature": 2.5}, "Expected 0 <= --eval.temperature <= 2, got 2.5."),
        ({"--ds.zero_stage": 7}, "Expected 0 <= --ds.zero_stage <= 3, got 7."),
        ({"--train.seed": 2**32}, "Expected 0 <= --train.seed < 2^32, got 4294967296."),
        (
            {"--reward.stop_properly_penalty_coef": 2},
            "Expected --reward.stop_properly_penalty_coef from 0 to 1, or a reward below 0, got 2.",
        ),
        ({"--actor.entropy_coef": "inf"}, "Expected a finite --actor.entropy_coef, got inf."),
    ],
    ids=str,
)
def test_what_works_with_no_estimator(
    refused: Callable[..., str], changes: dict[str, Any], message: str, estimator: str
) -> None:
    assert refused(changes | {"--algo.advantage.estimator": estimator}).startswith(message)


def test_numbers_that_have_a_meaning_upstream_are_accepted(command: dict[str, Any]) -> None:
    odd = "--algo.kl.init_coef 0 --ref.num_gpus_per_node 0 --critic.adam.lr -1 --reward.num_nodes 0 --eval.steps -1 "
    odd += "--ckpt.save_steps -1 --critic.freezing_steps -1 --actor.max_norm -1 --rollout.vllm_generate_batch_size 0 "
    odd += "--ds.zero_stage 0 --actor.adam.lr 0 --actor.eps_clip_low_high 1.5 inf --actor.entropy_coef -0.1 "
    odd += "--ckpt.max_mem inf --reward.stop_properly_penalty_coef -0.5 --algo.dynamic_filtering_range -1 1"
    parse([*argv_of(command), *odd.split()])


def test_upstreams_estimators_may_sample_from_a_part_of_the_distribution(command: dict[str, Any]) -> None:
    args = parse(argv_of(command | {"--algo.advantage.estimator": "group_norm", "--rollout.top_p": 0.9}))
    check_every_run(args)
    check_inputs(args)


@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("--logger.entropy_enable", True, "leave it out."),
        ("--logger.metrics_path", "metrics.jsonl", "give --logger.tensorboard_dir or --logger.wandb.key."),
        ("--eval.before_training", True, "leave it out, or give --eval.steps."),
        ("--ckpt.stop_file", "stop", "leave one of them out."),
    ],
)
def test_what_asynchronous_training_does_not_do(
    refused: Callable[..., str], flag: str, value: Any, remedy: str
) -> None:
    message = refused({"--algo.advantage.estimator": "group_norm", "--train.async_enable": True, flag: value})
    assert message.startswith(flag) and "--train.async_enable" in message and message.endswith(remedy)


def test_nothing_at_all_is_told_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_ppo_ray.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train_ppo_ray: Nothing to train: give --actor.model_name_or_path MODEL, ")
    assert "--help" in said and said.count("\n") == 1


def test_a_value_that_belongs_to_no_flag(refused: Callable[..., str]) -> None:
    assert refused({}, "stray") == "'stray' belongs to no flag; every argument is --flag VALUE."


@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path"])
def test_a_folder_that_cannot_be_written(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    file = tmp_path / "train.jsonl"
    assert refused({flag: file / "out"}).startswith(f"{flag} {file}/out cannot be a folder, as {file} is a file;")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # which nothing keeps from root
    path = tmp_path / "not" / "yet"
    assert refused({flag: path}).startswith(f"{flag} {path} cannot be written, as {tmp_path} is not writable;")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"{scheme}127.0.0.1:{sock.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert refused({}).startswith(f"No Ray cluster answers at RAY_ADDRESS={address} (")
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:999999")
    assert "No Ray cluster answers" in refused({})


# ── The model ──


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_json", ".json")).write_text(text)
    return path


def test_a_model_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    flag = "--actor.model_name_or_path"
    assert refused({flag: None}) == f"{flag} is missing; give a Hugging Face checkpoint."
    assert refused({flag: tmp_path / "nowhere"}) == f"{flag} {tmp_path / 'nowhere'} does not exist."
    assert "is not a Hugging Face checkpoint" in refused({flag: "no-such-user/no-such-model"})
    assert "without config.json" in refused({flag: folder(tmp_path / "empty")})
    assert "no weights" in refused({flag: folder(tmp_path / "config", config_json='{"model_type": "llama"}')})


@pytest.mark.parametrize("config", ["{", "[]", '{"model_type": "no_such_model"}', "{}"])
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
    assert "chat_template" in refused({"--data.apply_chat_template": True})


def test_a_vision_language_model(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    path = copy_model(model, tmp_path / "sees")
    (path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    assert "is a vision-language model" in refused({"--actor.model_name_or_path": path})


# ── A checkpoint with code of its own ──


@pytest.fixture
def with_code(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A copy of the model where one configuration file names a class in a file that leaves a mark when imported."""

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
    # A prompt longer in bytes than there is room for has to be tokenised.
    rows = table(tmp_path / "long.jsonl", [{"question": "é" * 30, "answer": ""}])
    args = parse(argv_of(command | trusted | {"--data.prompt_dataset": rows}))
    check_every_run(args)
    check_inputs(args)
    assert (tmp_path / "mark").exists()


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


def test_a_reward_server_that_does_not_answer(refused: Callable[..., str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]  # bound, but nobody listens
        for url in (f"http://127.0.0.1:{port}/get_reward", f"127.0.0.1:{port}"):
            message = refused({"--reward.remote_url": url})
            assert message.startswith(f"--reward.remote_url {url}: no reward server answers there")
    assert "no reward server answers there" in refused({"--reward.remote_url": "http://127.0.0.1:99999/"})


def test_an_agent_that_cannot_be_used(refused: Callable[..., str], tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    assert "does not exist" in refused({"--train.agent_func_path": agent})
    agent.write_text("class Agent: ...\n")
    assert "defines no AgentExecutor" in refused({"--train.agent_func_path": agent})


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
        ("broken.jsonl", '{"question": "a", "answer": \n', "cannot be read as jsonl"),
        ("text.parquet", "this is no parquet file", "cannot be read as parquet"),
        ("text.arrow", "this is no arrow file", "cannot be read as arrow"),
        ("script.py", "import os\n", "cannot be read as a data set: Dataset scripts are no longer supported"),
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
    """An empty one is refused; one of files, and one that datasets saved, are looked into."""
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


def test_a_data_set_without_the_columns(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    path = table(tmp_path / "other.jsonl", [{"text": "a", "answer": "b"}])
    assert refused({data_flag: path}).endswith("has no column 'question' (--data.input_key); it has text, answer.")
    path = table(tmp_path / "more.jsonl", [{"question": "a"}])
    assert refused({data_flag: path}).endswith("has no column 'answer' (--data.label_key); it has question.")


def test_a_data_set_without_the_split(refused: Callable[..., str]) -> None:
    assert "has no split 'test' (--data.prompt_split)" in refused({"--data.prompt_split": "test"})


@pytest.mark.parametrize("content", [None, 7, ["a"]])
def test_a_prompt_that_is_no_text(refused: Callable[..., str], data_flag: str, tmp_path: Path, content: Any) -> None:
    rows = [*ROWS, {"question": content, "answer": "b"}] if content is None else [{"question": content, "answer": "b"}]
    path = table(tmp_path / "odd.jsonl", rows)
    found = refused({data_flag: path})
    assert found.startswith(f"{data_flag} {path}: the prompt of row {len(rows) - 1} ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "", "answer": "b"}, "the prompt of row 4 is empty; drop that row."),
        (
            {"question": "a", "answer": None},
            "row 4 has no label ('answer' of --data.label_key is null); drop that row.",
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
    found = refused({data_flag: path})
    assert found.startswith(f"{data_flag} {path}: the prompt of row 4 has 49 tokens, but --data.max_len 64 with ")
    assert "leaves 48" in found


def test_a_prompt_that_just_fits(command: dict[str, Any], tmp_path: Path) -> None:
    path = table(tmp_path / "fits.jsonl", [{"question": "x" * 48, "answer": ""}])
    check_inputs(parse(argv_of(command | {"--data.prompt_dataset": path})))


def test_every_one_of_several_data_sets_is_looked_at(refused: Callable[..., str], tmp_path: Path) -> None:
    good = table(tmp_path / "good.jsonl", ROWS)
    assert refused({"--data.prompt_dataset": f"{good},{tmp_path}/no.jsonl"}).endswith("no.jsonl does not exist.")


def test_metrics_of_another_run_are_not_added_to(command: dict[str, Any], tmp_path: Path) -> None:
    metrics, checkpoints = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    command |= {"--logger.metrics_path": metrics, "--ckpt.path": checkpoints}
    with closing(MetricsWriter(metrics)) as writer:
        writer.begin(0, {"seed": 1})
        writer.write("train", 1, {})

        resumed = argv_of(command | {"--ckpt.load_enable": True})
        check_metrics_file(parse(resumed))  # it died before its first checkpoint
        with pytest.raises(UsageError, match="holds a run of 1 steps, and --ckpt.load_enable is not given"):
            check_metrics_file(parse(argv_of(command)))
        writer.end()
    with pytest.raises(UsageError, match=f"and --ckpt.path {checkpoints} has no checkpoint to go on with it"):
        check_metrics_file(parse(resumed))
    (checkpoints / "_actor").mkdir(parents=True)
    (checkpoints / "_actor" / "latest").write_text("global_step1")
    check_metrics_file(parse(resumed))
