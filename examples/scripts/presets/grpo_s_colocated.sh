# shellcheck shell=bash disable=SC2034
# GRPO-S on one node of 8 GPUs, trainer and vLLM engines on the same GPUs: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: entropy-weighted sequence rewards (β₁ = 1, β₂ = 0.1), sequence-level ratio and loss, clip-higher (0.2, 0.28),
#             no KL; the rest as gtpo_colocated
#
#   bash examples/scripts/train.sh grpo_s_colocated -- --algo.grpo_s.ratio_mean geometric     # GSPO's ratio
ALGORITHM="${ALGORITHM:-grpo_s}"
