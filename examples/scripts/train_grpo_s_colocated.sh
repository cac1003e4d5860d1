#!/usr/bin/env bash
# GRPO-S on one node of 8 GPUs, trainer and vLLM engines on the same GPUs: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: entropy-weighted sequence rewards (β₁ = 1, β₂ = 0.1), sequence-level ratio and loss, clip-higher (0.2, 0.28),
#             no KL; the rest as train_gtpo_colocated.sh
#
#   bash examples/scripts/train_grpo_s_colocated.sh [--dry-run] [--cpu] [-- trainer flags]
#   bash examples/scripts/train_grpo_s_colocated.sh -- --algo.grpo_s.ratio_mean geometric     # GSPO's ratio
#
# What is not set here is as in train_gtpo_colocated.sh, data included.
set -euo pipefail

ALGORITHM="${ALGORITHM:-grpo_s}"

# shellcheck source=examples/scripts/train_gtpo_colocated.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_gtpo_colocated.sh"
