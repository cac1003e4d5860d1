#!/usr/bin/env bash
# GTPO on one node of 8 GPUs, trainer and vLLM engines on the same GPUs: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: entropy-weighted token rewards (α₁ = 1, α₂ = 0.1), token-level loss, clip-higher (0.2, 0.28), no KL;
#             Megatron-core TP2 × DP4 with sequence parallelism and packing, vLLM TP2 × 4, sleep mode
#
#   python3 -m openrlhf_gtpo.cli.prepare math --source BytedTsinghua-SIA/DAPO-Math-17k --problem-key prompt \
#       --answer-key reward_model.ground_truth --eval-size 256 --output data/dapo_math        # once
#   bash examples/scripts/train_gtpo_colocated.sh --dry-run            # the resolved command
#   bash examples/scripts/train_gtpo_colocated.sh                      # ALGORITHM=grpo bash …: the baseline, all else equal
#   bash examples/scripts/train_gtpo_colocated.sh --cpu                # the same run in small, without a GPU
#   bash examples/scripts/train_gtpo_colocated.sh -- --train.seed 2    # flags of the trainer
set -euo pipefail

ALGORITHM="${ALGORITHM:-gtpo}"         # gtpo, grpo_s, grpo, dapo, gspo
PLACEMENT="${PLACEMENT:-colocated}"    # colocated, split

MODEL="${MODEL:-Qwen/Qwen2.5-7B}"      # a name on the Hugging Face hub, or a folder; Qwen/Qwen2.5-14B, …
DATA="${DATA:-data/dapo_math/train.jsonl}"
EVAL_DATA="${EVAL_DATA-data/dapo_math/eval.jsonl}"    # empty: no evaluation
EVAL_STEPS="${EVAL_STEPS:-20}"
REWARD="${REWARD:-$(dirname "${BASH_SOURCE[0]}")/../../openrlhf_gtpo/tasks/math_verify_reward.py}" # or your own file, or a server's URL
OUTPUT="${OUTPUT:-}"                   # empty: runs/ and this script's name
STEPS="${STEPS:-}"                     # that many batches of prompts (dynamic sampling spends more than one a step); empty: one pass over the data
SAVE_STEPS="${SAVE_STEPS:-20}"

NODES="${NODES:-1}"                    # of training
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR_PARALLEL="${TENSOR_PARALLEL:-2}"
PIPELINE_PARALLEL="${PIPELINE_PARALLEL:-1}"
CONTEXT_PARALLEL="${CONTEXT_PARALLEL:-1}"
FP8="${FP8:-}"                         # hybrid: FP8 products on Hopper; empty: BF16
FP8_RECIPE="${FP8_RECIPE:-blockwise}"  # delayed, tensorwise
FP8_PARAM="${FP8_PARAM:-}"             # 1: the decoder's weights in FP8 alone, which takes half their memory (not delayed)
FP8_AUDIT_STEPS="${FP8_AUDIT_STEPS:-0}" # every N-th batch is compared with BF16; 0: never
RECOMPUTE="${RECOMPUTE:-selective}"    # none is faster and needs more memory, full the other way round
MAX_TOKENS_PER_GPU="${MAX_TOKENS_PER_GPU:-12288}"
VLLM_ENGINES="${VLLM_ENGINES:-4}"      # colocated: engines × their tensor parallelism = all GPUs
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-2}"
VLLM_GPU_MEMORY="${VLLM_GPU_MEMORY:-0.6}"

SAMPLES_PER_PROMPT="${SAMPLES_PER_PROMPT:-16}"        # G
PROMPTS_PER_STEP="${PROMPTS_PER_STEP:-128}"
TRAIN_BATCH="${TRAIN_BATCH:-128}"      # responses an optimizer step; 2048 makes one on-policy update of each rollout
PROMPT_LENGTH="${PROMPT_LENGTH:-2048}"
RESPONSE_LENGTH="${RESPONSE_LENGTH:-4096}"
LEARNING_RATE="${LEARNING_RATE:-1e-6}"

# shellcheck source=examples/scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
