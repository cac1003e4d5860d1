# shellcheck shell=bash disable=SC2034
# GTPO on 4 nodes of 8 Hopper GPUs, trainer and vLLM engines on the same GPUs: Qwen2.5-32B, mathematics, FP8.
#
# Paper:      GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv 2508.04349
# Techniques: as gtpo_colocated (G = 16, global batch 128, learning rate 1e-6, prompts of 2048 and responses of 4096
#             tokens, temperature 1, clip 0.2/0.28, α₁ = 1, α₂ = 0.1); Megatron-core TP8 × DP4 with sequence parallelism, FP8
#             products with blockwise scales, every 20th batch audited for FP8's effect on advantages; vLLM TP8 × 4
#
#   sbatch examples/scripts/train_gtpo_slurm.sh                                # on SLURM
#   bash examples/scripts/train.sh gtpo_32b --submit http://127.0.0.1:6380     # on a Ray cluster, from its head
#
# Does it fit, and how fast will it be? python3 -m openrlhf_gtpo.cli.plan --help
MODEL="${MODEL:-Qwen/Qwen2.5-32B}"
NODES="${NODES:-4}"
TENSOR_PARALLEL="${TENSOR_PARALLEL:-8}"
FP8="${FP8-hybrid}" # empty: BF16
FP8_AUDIT_STEPS="${FP8_AUDIT_STEPS:-20}"
RECOMPUTE="${RECOMPUTE:-none}" # selective: 13 GiB less than the 66 planned per GPU, full: 19 less; both slower
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-8}"
