# shellcheck shell=bash disable=SC2034
# GRPO, the baseline, with all else equal to gtpo_colocated: Qwen2.5-7B on one node of 8 GPUs, mathematics.
#
# Paper:      DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300
# Techniques: advantages normalized within a group, equal weight for every response. To compare only credit, it clips
#             with 0.2 and 0.28, without a KL term, like GTPO here. With the paper's KL loss of 0.04 and OpenRLHF's clip
#             range (the paper gives none):
#
#   bash examples/scripts/train.sh grpo_colocated -- --actor.eps_clip_low_high 0.2 0.2 --algo.kl.init_coef 0.04 \
#       --ref.num_nodes 1 --ref.num_gpus_per_node 8
ALGORITHM="${ALGORITHM:-grpo}"
