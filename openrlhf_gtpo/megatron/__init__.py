"""The Megatron-core actor: a model over TP, PP, CP and EP ranks, its step and conversion. Knows torch and megatron."""

import os

# Transformer Engine reads it when Megatron first imports it (transformer_engine 2.11, common/recipe/__init__.py,
# Float8BlockScaling): scales of blocks are not rounded to powers of two.
os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
