# shellcheck shell=bash disable=SC2034
# GTPO on 8 nodes of 8 Hopper GPUs, 4 that train while the other 4 sample the next rollout: Qwen2.5-32B, mathematics, FP8.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as gtpo_32b, one step off (docs/async.md); no audit of FP8, because entropies come from vLLM's sampler
#
#   bash examples/scripts/train.sh gtpo_32b_async --submit http://127.0.0.1:6380     # on a Ray cluster, from its head
#
# Is it worth it? python3 -m openrlhf_gtpo.cli.plan --placement split --async-enable --help
MODEL="${MODEL:-Qwen/Qwen2.5-32B}"
PLACEMENT="${PLACEMENT:-split}"
ASYNC="${ASYNC-1}"
NODES="${NODES:-4}" # for training
TENSOR_PARALLEL="${TENSOR_PARALLEL:-8}"
FP8="${FP8-hybrid}" # empty: BF16
RECOMPUTE="${RECOMPUTE:-none}"
VLLM_ENGINES="${VLLM_ENGINES:-8}"
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-4}"
