# shellcheck shell=bash disable=SC2034
# GTPO on one node of 8 GPUs, 4 that train while the other 4 sample the next rollout: Qwen2.5-7B, mathematics.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as gtpo_split, one step off: a token has the entropy of the policy that sampled it (vLLM's sampler), and its
#             weight is min(ratio, 5), of the policies before training and when it was sampled (docs/async.md)
#
#   bash examples/scripts/train.sh gtpo_async
PLACEMENT="${PLACEMENT:-split}"
ASYNC="${ASYNC-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-4}" # for training
TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
VLLM_ENGINES="${VLLM_ENGINES:-4}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
