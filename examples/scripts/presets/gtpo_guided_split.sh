# shellcheck shell=bash disable=SC2034
# GTPO guided by a larger model on one node of 8 GPUs of 80 GB: Qwen2.5-7B, a quarter of the rows from Qwen2.5-32B.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349; the guide
#             after Improving DAPO from a Mixed-Policy Perspective, arXiv 2507.12931 (docs/guide.md says how closely)
# Techniques: as gtpo_split, but 4 GPUs train, 2 sample from the policy (TP1 × 2) and 2 from the guide (TP2), whose
#             share anneals to zero over 100 steps; dynamic sampling, rescue of always failing prompts in batches of 32
#
#   bash examples/scripts/train.sh gtpo_guided_split
GUIDE="${GUIDE-Qwen/Qwen2.5-32B}" # empty: none
GUIDE_FRACTION="${GUIDE_FRACTION:-0.25}"
GUIDE_STEPS="${GUIDE_STEPS:-100}"
GUIDE_TENSOR_PARALLEL="${GUIDE_TENSOR_PARALLEL:-2}"
RESCUE_BATCH="${RESCUE_BATCH:-32}"
PLACEMENT="${PLACEMENT:-split}"
GPUS_PER_NODE="${GPUS_PER_NODE:-4}" # for training
TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
VLLM_ENGINES="${VLLM_ENGINES:-2}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-1}"
