"""Makes the helpers beside the tests importable, here and in the processes that they start."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
