"""torch's fused AdamW makes the steps of DeepSpeed's FusedAdam, in whose place it is used."""

import pytest
import torch

from tests.support.adam_steps import SETTINGS, steps_of

version_info = pytest.importorskip("deepspeed.git_version_info", reason="needs DeepSpeed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not version_info.installed_ops.get("fused_adam"), reason="needs a compiled FusedAdam"),
]


def test_the_steps_are_the_same() -> None:
    from deepspeed.ops.adam import FusedAdam

    start = torch.randn(1000, generator=torch.Generator().manual_seed(0)).cuda()
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    actual = steps_of(torch.optim.AdamW([ours], fused=True, **SETTINGS), ours)
    torch.testing.assert_close(actual, steps_of(FusedAdam([theirs], **SETTINGS), theirs), rtol=1e-6, atol=1e-7)
