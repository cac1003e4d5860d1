# shellcheck shell=bash disable=SC2034
# GTPO on one GPU of 80 GB, trainer and vLLM engine taking turns: Qwen2.5-1.5B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as gtpo_colocated, without parallelism and with fewer prompts a step
#
#   bash examples/scripts/train.sh gtpo_one_gpu
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B}"
GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
TENSOR_PARALLEL="${TENSOR_PARALLEL:-1}"
VLLM_ENGINES="${VLLM_ENGINES:-1}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
PROMPTS_PER_STEP="${PROMPTS_PER_STEP:-16}"
