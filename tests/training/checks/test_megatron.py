"""A Megatron run that cannot work is refused in one sentence before any engine starts; what works is accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo import platform
from openrlhf_gtpo.training import host
from openrlhf_gtpo.training.checks.megatron import check_megatron
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.run import parse
from tests.support.command_lines import argv_of, assert_names

TP, PP = (f"--megatron.{name}_model_parallel_size" for name in ("tensor", "pipeline"))


FP8 = "--megatron.fp8"
GTPO = {"--algo.advantage.estimator": "gtpo"}

pytestmark = pytest.mark.usefixtures("no_engine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 layers, 6 attention heads and 2 key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def command(model: Path) -> dict[str, Any]:
    """A command line that passes every check; a test breaks one thing in it. None leaves a flag out."""
    return {
        "--actor.backend": "megatron",
        "--algo.advantage.estimator": "group_norm",
        "--actor.model_name_or_path": model,
        "--actor.num_gpus_per_node": 4,
        "--algo.kl.init_coef": 0,
        "--data.prompt_dataset": "train.jsonl",
        "--reward.remote_url": "reward.py",
        "--rollout.n_samples_per_prompt": 4,
        "--vllm.num_engines": 1,
    }


def check(args: SimpleNamespace) -> None:
    check_megatron(args, Model(args.actor.model_name_or_path, "--actor.model_name_or_path"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {TP: 2},
        {PP: 4},
        {TP: 2, PP: 2, "--megatron.sequence_parallel": True},
        {TP: 2, "--algo.kl.init_coef": 0.1, "--ref.num_gpus_per_node": 2},
        {TP: 2, "--algo.kl.init_coef": 0, "--ref.num_gpus_per_node": 3},
        {"--reward.remote_url": None, "--reward.model_name_or_path": "anything"},
        {"--megatron.override": "moe_router_dtype=fp32", "--megatron.offload": True, "--megatron.recompute": "full"},
        {FP8: "emulated", TP: 2},
        {FP8: "emulated", "--megatron.fp8_recipe": "delayed"},
        {FP8: "emulated", "--megatron.num_layers_at_start_in_bf16": 1},
        {FP8: "emulated", "--megatron.fp8_param": True, "--megatron.fp8_recipe": "tensorwise"},
        {"--actor.lr_scheduler": "constant", "--train.max_epochs": 2, "--actor.entropy_coef": 0.1},
        {"--train.dynamic_batch_enable": True, "--train.max_tokens_per_gpu": 16},
    ],
    ids=str,
)
def test_what_works_is_not_refused(command: dict[str, Any], changes: dict[str, Any]) -> None:
    check(parse(argv_of(command | changes)))


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "gtpo", "grpo_s"])
@pytest.mark.parametrize("changes", [{TP: 2}, {FP8: "emulated", "--actor.entropy_coef": 0.1}], ids=str)
def test_it_works_with_every_estimator(command: dict[str, Any], changes: dict[str, Any], estimator: str) -> None:
    check(parse(argv_of(command | changes | {"--algo.advantage.estimator": estimator})))


def test_a_checkpoint_that_is_not_whole_is_named_before_anything_starts(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    resume = {"--ckpt.path": tmp_path, "--ckpt.load_enable": True}
    check(parse(argv_of(command | resume)))  # nothing there yet: a first start
    folder = tmp_path / "_actor"
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3\n")
    message = refused(resume)
    assert message.startswith("--ckpt.load_enable: ") and "the checkpoint that latest names is gone" in message


def test_weights_in_another_format_than_safetensors(model: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").touch()
    assert "has no *.safetensors files" in refused({"--actor.model_name_or_path": tmp_path})


def test_deepspeed_is_not_held_to_these_rules(command: dict[str, Any]) -> None:
    odd = {"--actor.backend": None, "--actor.model_name_or_path": "/nowhere", "--actor.aux_loss_coef": 0.1}
    check(parse(argv_of(command | odd)))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({TP: 3}, "--megatron.tensor_model_parallel_size"),
        ({PP: 3}, "--megatron.pipeline_model_parallel_size"),
        ({TP: 2, "--actor.num_gpus_per_node": 3}, f"--actor.num_nodes --actor.num_gpus_per_node {TP} {PP}"),
        ({PP: 2, "--algo.kl.init_coef": 0.1, "--ref.num_gpus_per_node": 5}, "--ref.num_nodes --ref.num_gpus_per_node"),
        ({"--megatron.expert_model_parallel_size": 2}, "--megatron.expert_model_parallel_size llama"),
        ({"--train.batch_size": 6}, "--train.batch_size"),
        ({"--megatron.ddp": "overlap=false"}, "--megatron.ddp overlap"),
        ({FP8: "hybrid"}, "--megatron.fp8 8.9"),
        ({FP8: "emulated", "--megatron.num_layers_at_end_in_bf16": 4}, "--megatron.num_layers_at_end_in_bf16 4"),
        ({FP8: "emulated", "--megatron.fp8_param": True, "--megatron.fp8_recipe": "delayed"}, "--megatron.fp8_recipe"),
        (
            {FP8: "emulated", "--megatron.fp8_param": True, "--no-megatron.use_distributed_optimizer": True},
            "--megatron.fp8_param",
        ),
        ({"--algo.advantage.estimator": "gae"}, "--algo.advantage.estimator"),
        ({TP: 2, "--reward.remote_url": None, "--reward.model_name_or_path": "MODEL"}, "DeepSpeed"),
        ({"--train.enable_ema": True}, "--train.enable_ema"),
        ({"--ds.param_dtype": "fp16"}, "--ds.param_dtype --actor.backend"),
        ({"--actor.optim": "muon"}, "--actor.optim"),
        ({"--actor.aux_loss_coef": 0.01}, "--actor.aux_loss_coef"),
        ({"--vllm.sync_with_ray": True}, "--vllm.sync_with_ray"),
        ({"--actor.model_name_or_path": None}, "--actor.model_name_or_path"),
        ({"--actor.model_name_or_path": "/nowhere"}, "--actor.model_name_or_path"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_sentence(
    refused: Callable[..., str], model: Path, changes: dict[str, Any], names: str
) -> None:
    assert_names(refused({flag: model if value == "MODEL" else value for flag, value in changes.items()}), names)


def test_full_determinism_against_transformer_engines_own_variable(
    command: dict[str, Any], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    check(parse(argv_of(command)))
    message = refused({"--train.full_determinism_enable": True})
    assert "cannot be combined with NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 in the environment" in message


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_the_rules_hold_for_every_estimator(refused: Callable[..., str], estimator: str) -> None:
    assert "it can be 1 or 2." in refused({TP: 3, "--algo.advantage.estimator": estimator})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gpt_neox"}, "does not support the architecture 'gpt_neox'"),
        ({"model_type": "mistral", "sliding_window": 16}, "has no sliding-window attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rotary embedding 'yarn'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized (quantization_config"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, "does not support the architecture 'qwen2_vl'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_that_is_not_supported(
    refused: Callable[..., str], model: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in refused({"--actor.model_name_or_path": tmp_path})


def test_a_host_without_cuda_still_hears_of_offloading(command: dict[str, Any]) -> None:
    """Megatron can move states without CUDA, while DeepSpeed's offloading needs CUDA."""
    if platform.detect() != "cpu":
        pytest.skip("this host has CUDA")
    assert parse(argv_of(command | {"--megatron.offload": True})).ds.enable_sleep
    assert not parse(argv_of(command | {"--actor.backend": None, "--ds.enable_sleep": True})).ds.enable_sleep


def test_gpus_count_every_process_of_a_replica(command: dict[str, Any]) -> None:
    layout = {TP: 2, PP: 2, "--algo.kl.init_coef": 0.1, "--ref.num_gpus_per_node": 4}
    assert host.gpus_of(parse(argv_of(command | layout))) == (4, 4, 0, 0, 1, 0)
