# shellcheck shell=bash disable=SC2034
# GTPO on one node of 8 GPUs, trainer and vLLM engines on the same GPUs: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: entropy-weighted token rewards (α₁ = 1, α₂ = 0.1), token-level loss, clip-higher (0.2, 0.28), no KL;
#             Megatron-core TP2 × DP4 with sequence parallelism and packing, vLLM TP2 × 4, sleep mode
#
#   bash examples/scripts/train.sh gtpo_colocated                        # all settings are the defaults of train.sh
#   bash examples/scripts/train.sh gtpo_colocated -- --train.seed 2      # flags of the trainer
ALGORITHM="${ALGORITHM:-gtpo}"
