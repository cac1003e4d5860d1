# shellcheck shell=bash disable=SC2034
# DAPO, the baseline, with all else equal to gtpo_colocated: Qwen2.5-7B on one node of 8 GPUs, mathematics.
#
# Paper:      DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476
# Techniques: clip-higher (0.2, 0.28), dynamic sampling, token-level loss, overlong penalty, no KL
#
#   bash examples/scripts/train.sh dapo_colocated
#   ALGORITHM=dapo bash examples/scripts/train.sh gtpo_split     # in the other placement
ALGORITHM="${ALGORITHM:-dapo}"
