"""The Megatron-core actor: a model over TP, PP, CP and EP ranks, its step, its conversion. Knows torch and megatron."""

import os

# Transformer Engine reads it when it is imported: scales of FP8 blocks in float32, as in the emulation, not powers of two.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
