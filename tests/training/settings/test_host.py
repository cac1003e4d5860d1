"""A run's GPUs are those for which OpenRLHF's ``train`` makes placement groups; a missing Ray is reported in one
sentence; workers start with the variables that libraries read before any of the workers' code runs."""

import os
import sys
from contextlib import nullcontext
from subprocess import CompletedProcess
from typing import Any

import pytest
import ray
import torch

from openrlhf_gtpo.errors import Restartable, UsageError
from openrlhf_gtpo.platform import PLATFORM_VARIABLE
from openrlhf_gtpo.platform import gpus as gpus_here
from openrlhf_gtpo.training import host
from openrlhf_gtpo.training.host import Gpus, check_gpus, check_ray, gpus_of, start_ray, without_kernels
from openrlhf_gtpo.training.settings import upstream_parser
from openrlhf_gtpo.training.settings.frozen import changed, freeze

SIZES = (
    "--actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2"
)
CRITIC = "--algo.advantage.estimator gae --reward.model_name_or_path rm --actor.model_name_or_path m"
GROUP = (
    "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 2 --reward.remote_url r.py "
    "--vllm.num_engines 1"
)
GUIDE = (
    "--algo.guide.model_name_or_path m --algo.guide.fraction 0.5 --algo.guide.num_engines 2 "
    "--algo.guide.tensor_parallel_size 2"
)


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [
        (GROUP, Gpus(4, 4, 0, 0, 6, 0)),
        (f"{GROUP} --algo.kl.init_coef 0", Gpus(4, 0, 0, 0, 6, 0)),
        (f"{GROUP} --train.colocate_actor_ref", Gpus(4, 0, 0, 0, 6, 0)),
        (f"{GROUP} --train.colocate_all", Gpus(4, 0, 0, 0, 0, 0)),
        (f"{GROUP} --train.colocate_all --train.async_enable", Gpus(4, 0, 0, 0, 6, 0)),  # engines stay apart
        (f"{GROUP} {GUIDE}", Gpus(4, 4, 0, 0, 6, 4)),
        (f"{GROUP} {GUIDE} --train.colocate_all", Gpus(4, 0, 0, 0, 0, 0)),
        (CRITIC, Gpus(4, 4, 2, 2, 6, 0)),
        (f"{CRITIC} --train.colocate_critic_reward", Gpus(4, 4, 2, 0, 6, 0)),
        (f"{CRITIC} --train.colocate_all", Gpus(4, 0, 0, 0, 0, 0)),
        (f"{CRITIC} --train.colocate_all --train.colocate_critic_reward", Gpus(4, 0, 2, 0, 0, 0)),
    ],
)
def test_each_group_counts_what_it_does_not_share(argv: str, gpus: Gpus) -> None:
    engines = "--vllm.num_engines 3 --vllm.tensor_parallel_size 2"
    assert gpus_of(upstream_parser.parse(f"{SIZES} {argv} {engines}".split())) == gpus


def test_an_agents_run_has_no_reward_model() -> None:
    argv = f"{GROUP} --reward.num_gpus_per_node 2 --train.agent_func_path agent.py"
    args = upstream_parser.parse(argv.replace("--reward.remote_url r.py", "").split())
    assert gpus_of(args).reward == 0


@pytest.mark.parametrize(
    ("argv", "attention", "said"),
    [
        ("", "sdpa", "flash-attn here: --ds.attn_implementation is sdpa."),
        ("--ds.packing_samples", "varlen", "flash-attn here: --ds.attn_implementation is varlen."),
        (
            "--train.dynamic_batch_enable --train.max_tokens_per_gpu 4096",
            "varlen",
            "flash-attn here: --ds.attn_implementation is varlen.",
        ),
        ("--ds.attn_implementation flash_attention_3 --ds.packing_samples", "flash_attention_3", ""),
        (
            "--actor.backend megatron",
            "sdpa",
            "Transformer Engine here: Megatron runs with this package's own layers. ",
        ),
    ],
)
def test_a_gpu_does_without_compiled_kernels(
    argv: str, attention: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they are installed, and for any other attention that was asked for, nothing changes."""
    args = freeze(upstream_parser.parse(f"{GROUP} {argv}".split()))
    capsys.readouterr()
    monkeypatch.setattr(host, "is_installed", lambda package: True)
    assert not without_kernels(args) and not capsys.readouterr().err
    monkeypatch.setattr(host, "is_installed", lambda package: False)
    args = changed(args, without_kernels(args))
    assert args.ds.attn_implementation == attention
    printed = capsys.readouterr().err
    assert printed.startswith(said and f"No {said}") and len(printed.splitlines()) == bool(said)


def test_a_ray_that_does_not_answer_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    args = upstream_parser.parse(GROUP.split())
    with pytest.raises(
        UsageError, match=r"RAY_ADDRESS=auto \(Could not find any running Ray instance\.\); start one there, or unset"
    ):
        start_ray(args, gpus=1)


def test_ray_is_started_again_if_its_agents_were_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else Ray raises is shown as it is."""
    raised = [Exception(f"The current node {what}") for what in ("timed out during startup.",) * 12 + ("is no node.",)]
    monkeypatch.setattr(ray, "init", lambda **options: raised and _raise(raised.pop(0)))
    args = upstream_parser.parse(GROUP.split())
    with pytest.raises(Restartable, match="Ray did not start on this host in 10 attempts of 30 s"):
        start_ray(args, gpus=1)
    with pytest.raises(Exception, match="is no node"):
        start_ray(args, gpus=1)
    start_ray(args, gpus=1)


def _raise(error: Exception) -> None:
    raise error


VARIABLES = (
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NCCL_ALGO",
    "NCCL_DEBUG",
)
MEGATRON = "--actor.backend megatron"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Maps a command line, and VARIABLES in the driver's environment, to the runtime environment that Ray is given."""

    def started(argv: str, **environment: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        monkeypatch.setattr(ray, "init", lambda **options: found.update(options["runtime_env"]))
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "")
        monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        start_ray(upstream_parser.parse(f"{GROUP} {argv}".split()), gpus=1)
        return found

    return started


@pytest.mark.parametrize("folder", ["/home/a b", "/home/o'neill", "/tmp/copy(1)", "/home/josé/x-1.2"])
def test_a_path_that_rays_shell_takes_apart(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "executable", f"{folder}/.venv/bin/python")
    refused = pytest.raises(UsageError, match="Ray cannot start its workers with /.*/python: put the environment in")
    with nullcontext() if folder.endswith("x-1.2") else refused:
        check_ray()


@pytest.mark.parametrize(
    ("chosen", "address", "refused"), [("cuda", "", True), ("cpu", "", False), ("cuda", "h:1", False)]
)
def test_gpus_that_are_too_old_are_refused_where_ray_is_to_start(
    chosen: str, address: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, chosen)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        gpus_here, "nvidia_smi", lambda *fields: CompletedProcess(fields, 0, "535.183.01, Tesla T4\n", "")
    )
    with (
        pytest.raises(UsageError, match="Tesla T4 has driver 535.183.01, and CUDA 13 needs 580")
        if refused
        else nullcontext()
    ):
        check_gpus()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", ("1", None, None, None)),
        ("--train.full_determinism_enable", ("1", None, None, None)),  # left to OpenRLHF on DeepSpeed
        (MEGATRON, ("1", None, None, None)),
        (f"{MEGATRON} --megatron.tensor_model_parallel_size 2", ("1", "1", None, None)),
        (f"{MEGATRON} --megatron.context_parallel_size 2", ("1", "1", None, None)),
        (f"{MEGATRON} --megatron.pipeline_model_parallel_size 2", ("1", None, None, None)),
        (f"{MEGATRON} --train.full_determinism_enable", ("1", None, "0", "Ring")),
    ],
)
def test_workers_start_with_what_libraries_read_early(workers: Any, argv: str, expected: tuple) -> None:
    environment = workers(argv)["env_vars"]
    assert tuple(environment.get(name) for name in VARIABLES[:4]) == expected


@pytest.mark.parametrize("chosen", ["cpu", "cuda"])
def test_workers_of_either_platform_prepare_themselves(
    workers: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLATFORM_VARIABLE, chosen)
    environment = workers("")
    assert environment["env_vars"][PLATFORM_VARIABLE] == chosen
    assert environment["worker_process_setup_hook"] == "openrlhf_gtpo.platform.activate"


def test_what_the_user_has_set_reaches_the_workers_instead(workers: Any) -> None:
    argv = f"{MEGATRON} --megatron.tensor_model_parallel_size 2 --train.full_determinism_enable"
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO"}
    environment = workers(argv, **own)["env_vars"]
    assert own.items() <= environment.items()


def test_a_submitted_jobs_own_environment_is_no_conflict(workers: Any) -> None:
    """`ray job submit --runtime-env-json` puts the job's environment into the driver's, too."""
    from ray.runtime_env.runtime_env import _merge_runtime_env  # as ray.init does in 2.55

    of_job = {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "OF_THE_JOB": "x"}
    of_run = workers(f"{MEGATRON} --megatron.tensor_model_parallel_size 2", **of_job)
    override = os.environ.get("RAY_OVERRIDE_JOB_RUNTIME_ENV") == "1"
    merged = _merge_runtime_env({"env_vars": of_job}, of_run, override=override)  # type: ignore[arg-type]
    assert merged is not None and of_job.items() <= merged["env_vars"].items()
