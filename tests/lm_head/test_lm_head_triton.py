"""Runs `lm_head_triton_cases.py`: in Triton's interpreter, or on the GPU where there is one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from tests.support.lm_head_reference import make_case


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels():
    """Triton decides on import whether to interpret, hence the separate process."""
    cases = Path(__file__).with_name("lm_head_triton_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_implementation_that_cannot_be_is_refused(monkeypatch):
    case = make_case(2, 4, 9, dtype=torch.float32)
    call = (case.hidden, case.weight, case.labels)
    with pytest.raises(ValueError, match="must be auto, portable or triton, but it is 'cuda'"):
        linear_log_prob_and_entropy(*call, implementation="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="need a CUDA device, or TRITON_INTERPRET=1|triton is not installed"):
        linear_log_prob_and_entropy(*call, implementation="triton")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("optional", [True, False], ids=["all", "none"])
def test_the_kernels_compile_for_hopper(optional, tmp_path, monkeypatch):
    """Triton ships NVIDIA's assembler, so this needs no GPU. The interpreter accepts more than the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget

    from openrlhf_gtpo.lm_head import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    flags = {kernels._absorb: ("WITH_ENTROPY", "weighted_exponents"), kernels._gradient: ("WITH_SLOPE", "slope")}
    for kernel, (flag, pointer) in flags.items():
        types = dict.fromkeys(kernel.arg_names, "*fp32")
        types |= {"logits": "*bf16", "labels": "*i64", "columns": "i32", "bits_per_logit": "fp32"}
        types |= {"row_stride": "i32"} if kernel is kernels._absorb else {}
        constants = {"HAS_BIAS": optional, flag: optional, "BLOCK": 2048}
        if not optional:
            constants |= {"bias": None, pointer: None}
        types |= dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
