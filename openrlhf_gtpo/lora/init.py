"""The initial values of adapters, the same for every backend, layout and number of processes."""

import math
import zlib

import torch
from torch import Tensor


def initial_a(rank: int, inputs: int, name: str, seed: int) -> Tensor:
    """Draw the initial A, (rank, inputs) float32, as PEFT does (kaiming_uniform_ with a = sqrt(5)); B starts at zero.

    Args:
        name: Hugging Face's name of the weight, so that each weight gets other values.
        seed: the run's seed.
    """
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    return torch.nn.init.kaiming_uniform_(torch.empty(rank, inputs), a=math.sqrt(5), generator=generator)
