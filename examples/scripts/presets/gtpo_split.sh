# shellcheck shell=bash disable=SC2034
# GTPO on one node of 8 GPUs, 4 that train and 4 that sample: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as gtpo_colocated, but no sleep mode and no offload: weights go to the engines by NCCL broadcast. No process has to
#             free memory for another, but half of the GPUs wait while the other half works.
#
#   bash examples/scripts/train.sh gtpo_split
PLACEMENT="${PLACEMENT:-split}"
GPUS_PER_NODE="${GPUS_PER_NODE:-4}" # for training
TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
VLLM_ENGINES="${VLLM_ENGINES:-4}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
