"""The Megatron-core actor: a model over TP, PP, CP and EP ranks, its step, its conversion. Knows torch and megatron."""

import os

# Transformer Engine reads it when it is imported, which the first import of Megatron does: scales of blocks are not rounded
# to powers of two.
os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
