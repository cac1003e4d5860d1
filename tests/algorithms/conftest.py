"""Makes the reference loops beside the tests importable under every pytest import mode."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
