"""Stand-ins are active on a host without CUDA, and on a CUDA host only flash-attn's, where that is missing.

Each test looks at its own process.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT

Fresh = Callable[..., str]  # see conftest.py

CPU = {"OPENRLHF_GTPO_PLATFORM": "cpu"}


def test_a_process_of_a_cpu_run_answers_what_openrlhf_asks(fresh: Fresh) -> None:
    """Even if it is activated twice; what the user has set stays."""
    program = """
import importlib.util, os, sys, torch
from openrlhf_gtpo import platform
platform.activate()
modules, flash_attn = set(sys.modules), sys.modules["flash_attn"]
platform.activate()
assert set(sys.modules) == modules and sys.modules["flash_attn"] is flash_attn
device = torch.cuda.current_device()
print(torch.ones(2).to(device).device, torch.zeros(1, device=device).device, torch.device(device), f"cuda:{device}")
torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.set_device(0); torch.cuda.synchronize(device)
import flash_attn.bert_padding, flash_attn.utils.distributed
assert importlib.util.find_spec("flash_attn") is not None
print(*(os.environ[name] for name in ("DS_ACCELERATOR", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")))
"""
    answers = fresh(program, VLLM_CPU_KVCACHE_SPACE="7", **CPU)
    assert answers.splitlines() == ["cpu cpu cpu cuda:0", "cpu nobind 7"]


def test_nothing_of_it_is_active_on_a_cuda_host_or_where_nobody_chose_a_platform(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    program = f"""
import os, sys, torch, torch.cuda
sys.path.append({str(tmp_path)!r})
import openrlhf_gtpo.platform as platform

def state():
    return (
        {{name: id(value) for name, value in vars(torch.cuda).items()}},
        {{name: id(value) for name, value in sys.modules.items() if not name.startswith("openrlhf_gtpo")}},
        dict(os.environ),
    )

for chosen in ({{}}, {{"OPENRLHF_GTPO_PLATFORM": "cuda"}}):
    os.environ.update(chosen)
    before = state()
    platform.activate()
    assert state() == before
    assert "openrlhf_gtpo.platform.cpu" not in sys.modules
    assert "openrlhf_gtpo.platform.flash_attn_stand_in" not in sys.modules
"""
    fresh(program)


def test_a_cuda_host_without_flash_attn_imports_openrlhf_all_the_same(fresh: Fresh) -> None:
    """Transformers and Transformer Engine still see that it is absent."""
    program = """
import os
os.environ["OPENRLHF_GTPO_PLATFORM"] = "cuda"
from openrlhf_gtpo import platform
platform.activate()
import openrlhf.models.ring_attn_utils
from transformers.utils import is_flash_attn_2_available
assert not is_flash_attn_2_available() and "openrlhf_gtpo.platform.cpu" not in os.sys.modules
"""
    fresh(program)


@pytest.mark.parametrize("chosen", ["cpu", "cuda"])
def test_a_flash_attn_that_is_there_is_left_alone(fresh: Fresh, chosen: str) -> None:
    program = """
import sys, types
real = sys.modules["flash_attn"] = types.ModuleType("flash_attn")
from openrlhf_gtpo import platform
platform.activate()
assert sys.modules["flash_attn"] is real
assert "openrlhf_gtpo.platform.flash_attn_stand_in" not in sys.modules
"""
    fresh(program, OPENRLHF_GTPO_PLATFORM=chosen)


@pytest.mark.parametrize("own", [{}, {"TRITON_HOME": "/own"}])
def test_a_user_without_a_home_gets_another_folder_for_compiled_kernels(
    fresh: Fresh, tmp_path: Path, own: dict[str, str]
) -> None:
    """Importing DeepSpeed makes a folder in it; what the user has set stays."""
    program = """
import os, pathlib
os.access = lambda path, mode: False  # root may write anywhere
from openrlhf_gtpo import platform
for _ in range(2):
    platform.activate()
    home = os.environ["TRITON_HOME"]
    if home != "/own":
        pathlib.Path(home, "autotune").mkdir(exist_ok=True)
        assert os.stat(home).st_mode & 0o777 == 0o700
print(home)
"""
    assert fresh(program, TMPDIR=str(tmp_path), **own).startswith(own.get("TRITON_HOME", str(tmp_path)))


def test_below_uv_run_workers_start_as_without_it(fresh: Fresh, tmp_path: Path) -> None:
    """In the same folder, with the same Python; unless the user asks Ray for its copy."""
    program = """
import sys
from openrlhf_gtpo import platform
platform.choose()
from ray._private import worker
print(worker._maybe_modify_runtime_env({"env_vars": {}}, False).get("working_dir"))
"""
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "run").write_text(f"{sys.executable} {tmp_path}/program.py 2>{tmp_path}/log; exit $?\n")
    below_uv = f"""
import subprocess
ended = subprocess.run(["uv", "run"], executable="/bin/sh", cwd={str(tmp_path)!r}, capture_output=True, text=True)
print(ended.stdout.strip())
"""
    environment = {"PYTHONPATH": str(ROOT), **CPU}
    assert fresh(below_uv, **environment) == "None"
    assert fresh(below_uv, RAY_ENABLE_UV_RUN_RUNTIME_ENV="1", **environment) == str(tmp_path)
