"""What the command line asks of model, data and host is there, or refused in one sentence before any engine starts;
what works is accepted. Contradictions within it are in ``settings/command_lines.jsonl``."""

import dataclasses
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training import host
from openrlhf_gtpo.training.run import check, parse
from tests.support.command_lines import argv_of, assert_names

pytestmark = pytest.mark.usefixtures("no_engine")

AHEAD = {"--train.async_enable": True, "--algo.advantage.is_correction_level": "token", "--rollout.entropy": "auto"}
UPSTREAMS = {"--algo.advantage.estimator": "group_norm"}


def test_the_command_line_of_these_tests_is_good(command: dict[str, Any]) -> None:
    for estimator in ("gtpo", "grpo_s"):
        check(parse(argv_of(command | {"--algo.advantage.estimator": estimator})))


def test_upstreams_estimators_are_held_to_what_always_fails(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    upstreams = {"--algo.advantage.estimator": "group_norm", "--rollout.top_p": 0.9}
    for flag in ("--data.prompt_dataset", "--eval.dataset", "--actor.model_name_or_path", "--train.agent_func_path"):
        assert "/nowhere.jsonl" in refused(upstreams | {flag: "/nowhere.jsonl"})
    assert "has no column 'text'" in refused(upstreams | {"--data.input_key": "text"})
    (tmp_path / "null.jsonl").write_text('{"question": "2 + 2", "answer": null}\n')
    check(parse(argv_of(command | upstreams | {"--data.prompt_dataset": tmp_path / "null.jsonl"})))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"--data.prompt_split": "test"}, "--data.prompt_split test"),
        ({"--data.max_images_per_prompt": 1}, "--data.max_images_per_prompt gtpo"),
        (AHEAD | UPSTREAMS | {"--data.max_images_per_prompt": 1}, "--data.max_images_per_prompt --train.async_enable"),
    ],
    ids=str,
)
def test_what_model_or_data_contradict(refused: Callable[..., str], changes: dict[str, Any], names: str) -> None:
    assert_names(refused(changes), names)


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_a_quantized_policy(refused: Callable[..., str], model: Path, tmp_path: Path, estimator: str) -> None:
    quantized = tmp_path / "quantized"
    shutil.copytree(model, quantized)
    fields = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "fp8"}}))
    message = refused({"--actor.model_name_or_path": quantized, "--algo.advantage.estimator": estimator})
    assert message.startswith(f"--actor.model_name_or_path {quantized} is quantized (quantization_config")


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_an_asynchronous_run_takes_what_a_synchronous_one_takes(command: dict[str, Any], estimator: str) -> None:
    changes = {"--algo.advantage.estimator": estimator, "--eval.before_training": True, "--train.spike_zscore": 10}
    args = parse(argv_of(command | AHEAD | changes))
    check(args)
    assert estimator != "gtpo" or args.rollout.entropy == "sampler"


@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path"])
def test_a_folder_that_cannot_be_written(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """Training would hear of it at its first checkpoint, or at its end."""
    file = tmp_path / "train.jsonl"
    if flag == "--ckpt.output_dir":
        assert refused({flag: file / "out"}).startswith(f"{flag} {file}/out cannot be written: {file} is not a")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # mocked, since root may write anywhere
    path = tmp_path / "not" / "yet"
    assert refused({flag: path}).startswith(f"{flag} {path} cannot be written: {tmp_path} is not a")


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


def test_a_dashboard_is_no_cluster_to_join(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "(it is a dashboard; use `ray job submit` with it); start one there, or unset" in refused({})


def test_the_engines_are_told_their_sizes(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the start of Ray runs for real."""
    from openrlhf.cli import train_ppo_ray
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import vllm_engine
    from openrlhf.utils import deepspeed

    for module, name in (
        (train_ppo_ray, "RayActorGroup CriticModelActor PolicyModelActor"),
        (vllm_engine, "RolloutRayActor"),
        (ppo_trainer, "PPOTrainer"),
        (deepspeed, "DeepspeedStrategy"),
    ):
        for one in name.split():
            monkeypatch.setattr(module, one, getattr(module, one))  # set to itself, so that it is restored at the end

    def start_ray(args: Any, gpus: int) -> None:
        assert args.train.shares_prompts  # decided by whoever trains, as a supervised run's process checks nothing
        raise UsageError("as far as this test goes.")

    monkeypatch.setattr(host, "start_ray", start_ray)
    for sizes in ({}, {"--vllm.max_num_seqs": 512, "--vllm.max_num_batched_tokens": 4096}):
        assert refused(sizes) == "as far as this test goes."
        actor = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
        copy = cloudpickle.loads(cloudpickle.dumps(actor))  # as sent to its process
        assert list(copy.engine_args.values()) == (list(sizes.values()) or [None, None])
        assert set(copy.engine_args) <= {field.name for field in dataclasses.fields(vllm_engine.vllm.AsyncEngineArgs)}
