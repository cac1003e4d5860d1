"""The byte budget holds at T = 16384, where the logits would take 128 or 256 MiB."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy, projection
from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc")
def test_peak_memory_beyond_inputs_and_outputs_stays_within_the_budget():
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.support.lm_head_memory"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    # A few numbers per token and the allocator's rounding come on top of the budget: 1 MiB at this size.
    # Where the CPU has no bfloat16 products, oneDNN makes float32 copies for them.
    room = {"float32": 1.1, "bfloat16": 1.1 if torch.cpu._is_avx512_bf16_supported() else 1.4}
    over = [row for row in rows if row["peak_mib"] > room[row["dtype"]] * row["budget_mib"] + 1]
    assert rows and not over, over


def test_a_turn_s_accumulator_is_gone_before_the_next_is_made(monkeypatch):
    """Resident memory does not show it: zeros take none before they are written."""
    zeros, made = torch.zeros, []

    def noting(*size, **kwargs):
        tensor = zeros(*size, **kwargs)
        if tensor.dim() == 2:  # (tokens of the turn, H)
            assert not any(one() is not None for one in made)
            made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(projection.torch, "zeros", noting)
    hidden, weight = torch.randn(64, 32, dtype=torch.bfloat16), torch.randn(96, 32, dtype=torch.bfloat16)
    labels = torch.arange(64)
    log_prob, _ = linear_log_prob_and_entropy(hidden.requires_grad_(), weight, labels, chunk_bytes=3072)
    log_prob.sum().backward()
    assert len(made) >= 3 and hidden.grad is not None
