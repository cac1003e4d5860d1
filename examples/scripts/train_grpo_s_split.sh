#!/usr/bin/env bash
# GRPO-S on one node of 8 GPUs, 4 that train and 4 that sample: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: those of train_grpo_s_colocated.sh in the placement of train_gtpo_split.sh
#
#   bash examples/scripts/train_grpo_s_split.sh [--dry-run] [--cpu] [-- trainer flags]
set -euo pipefail

ALGORITHM="${ALGORITHM:-grpo_s}"

# shellcheck source=examples/scripts/train_gtpo_split.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_gtpo_split.sh"
