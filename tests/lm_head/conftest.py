"""Makes the reference and the rank programs beside the tests, and the pool of ranks, importable under every pytest
import mode."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "megatron")]
torch.set_num_threads(1)  # the tensors are small, and threads that wait for each other only cost time
