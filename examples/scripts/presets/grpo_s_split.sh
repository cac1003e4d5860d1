# shellcheck shell=bash disable=SC2034
# GRPO-S on one node of 8 GPUs, 4 that train and 4 that sample: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as grpo_s_colocated, with the placement of gtpo_split
#
#   bash examples/scripts/train.sh grpo_s_split
ALGORITHM="${ALGORITHM:-grpo_s}"
PLACEMENT="${PLACEMENT:-split}"
GPUS_PER_NODE="${GPUS_PER_NODE:-4}" # for training
TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
VLLM_ENGINES="${VLLM_ENGINES:-4}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
