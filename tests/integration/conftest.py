"""Lets these tests import OpenRLHF on a host without CUDA, and the helpers beside them under every import mode."""

import os
import sys
from pathlib import Path

import torch

from openrlhf_gtpo import platform

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
os.environ.setdefault(platform.PLATFORM_VARIABLE, platform.detect())
platform.activate()
