"""Packed rows attend with torch's own FlashAttention kernels as they would alone."""

from typing import Any

import pytest
import torch

from tests.support.packed_rows import CONFIGS, check_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's FlashAttention kernels have no CPU version"),
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_rows_attend_as_each_does_alone(config: Any) -> None:
    check_rows(config, "cuda", torch.bfloat16, 0.05)
