"""GTPO and GRPO-S for OpenRLHF, with a Megatron-core actor beside the DeepSpeed one.

Importing this package sets one environment variable and imports nothing heavy. Each room (`algorithms`, `lm_head`,
`megatron`, `weight_sync`, `training`, `platform`, `report`, `cli`) imports only what it needs.
"""

import os

from openrlhf_gtpo._version import __version__

# Do not round the scales of FP8 blocks to powers of two. Transformer Engine reads the variable once, on import (2.11,
# common/recipe/__init__.py, Float8BlockScaling), and OpenRLHF imports PEFT, which imports Transformer Engine
# (tuners/lora/te.py) before Megatron does. A value set by the user stays, but megatron/fp8/options.py then rejects the
# recipe unless the value is 1.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")

__all__ = ["__version__"]
