# shellcheck shell=bash disable=SC2034
# GTPO with LoRA on one GPU of 80 GB, trainer and vLLM engine taking turns: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as gtpo_one_gpu, with LoRA adapters of rank 32, merged into the weights for the engines (docs/lora.md)
#
#   bash examples/scripts/train.sh gtpo_7b_lora
MODEL="${MODEL:-Qwen/Qwen2.5-7B}"
LORA_RANK="${LORA_RANK-32}"
GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
TENSOR_PARALLEL="${TENSOR_PARALLEL:-1}"
RECOMPUTE="${RECOMPUTE:-selective}" # as planned: 42 of 80 GB while training
VLLM_ENGINES="${VLLM_ENGINES:-1}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
PROMPTS_PER_STEP="${PROMPTS_PER_STEP:-16}"
