#!/usr/bin/env bash
# DAPO, the baseline, with all else equal to train_gtpo_colocated.sh: Qwen2.5-7B on one node of 8 GPUs, mathematics.
#
# Paper:      DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476
# Techniques: clip-higher (0.2, 0.28), dynamic sampling, token-level loss, overlong penalty, no KL
#
#   bash examples/scripts/train_dapo_colocated.sh [--dry-run] [--cpu] [-- trainer flags]
#   PLACEMENT=… or ALGORITHM=dapo bash examples/scripts/train_gtpo_split.sh for the other placement
set -euo pipefail

ALGORITHM="${ALGORITHM:-dapo}"

# shellcheck source=examples/scripts/train_gtpo_colocated.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_gtpo_colocated.sh"
