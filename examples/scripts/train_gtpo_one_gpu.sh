#!/usr/bin/env bash
# GTPO on one GPU of 80 GB, trainer and vLLM engine in turns: Qwen2.5-1.5B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as train_gtpo_colocated.sh, without parallelism and with fewer prompts a step
#
#   bash examples/scripts/train_gtpo_one_gpu.sh [--dry-run] [--cpu] [-- trainer flags]
#
# What is not set here is as in train_gtpo_colocated.sh, data included.
set -euo pipefail

MODEL="${MODEL:-Qwen/Qwen2.5-1.5B}"
GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
TENSOR_PARALLEL="${TENSOR_PARALLEL:-1}"
VLLM_ENGINES="${VLLM_ENGINES:-1}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
PROMPTS_PER_STEP="${PROMPTS_PER_STEP:-16}"

# shellcheck source=examples/scripts/train_gtpo_colocated.sh
source "$(dirname "${BASH_SOURCE[0]}")/train_gtpo_colocated.sh"
