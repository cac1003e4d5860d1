"""GTPO and GRPO-S for OpenRLHF, with a Megatron-core actor beside the DeepSpeed one.

Importing this package sets one environment variable and brings in nothing heavy; each room (`algorithms`, `lm_head`,
`megatron`, `weight_sync`, `integration`, `platform`, `report`, `cli`) brings in only what it needs.
"""

import os

from openrlhf_gtpo._version import __version__

# Scales of FP8 blocks are not rounded to powers of two. Transformer Engine reads it once, when it is imported (2.11,
# common/recipe/__init__.py, Float8BlockScaling), and OpenRLHF imports PEFT, which does that (tuners/lora/te.py) before
# Megatron. What the user has set stays, and the recipe is refused with anything but 1 (megatron/fp8/options.py).
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")

__all__ = ["__version__"]
