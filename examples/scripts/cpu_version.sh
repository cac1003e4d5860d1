#!/usr/bin/env bash
# Sourced by launch.sh for --cpu: the same algorithm, placement, backend and kind of layout in sizes that two cores run in
# a minute or two. A 2-layer model made on the spot (or CPU_MODEL=DIR), one-digit products, Math-Verify as the reward.
#
# Tensor and pipeline parallelism become at most 2, context parallelism 1 (CUDA only), nodes at most 2 where a cluster is
# given; FP8 is emulated; colocated engines are as many as training processes, a split run has one.

: "${root:?}" "${scripts:?}" "${dry_run:?}" # of launch.sh

# shellcheck disable=SC2034 # launch.sh reads all of this
{
    at_most() { printf '%s' "$(($1 < $2 ? $1 : $2))"; }
    TENSOR_PARALLEL="$(at_most "$TENSOR_PARALLEL" 2)" PIPELINE_PARALLEL="$(at_most "$PIPELINE_PARALLEL" 2)" CONTEXT_PARALLEL=1
    processes="$((TENSOR_PARALLEL * PIPELINE_PARALLEL))"
    NODES="$(at_most "$NODES" "$(at_most 2 "$processes")")"
    GPUS_PER_NODE="$((processes / NODES))"
    VLLM_TENSOR_PARALLEL=1 VLLM_ENGINES=1 VLLM_GPU_MEMORY=0.2
    [[ "$PLACEMENT" == split ]] || VLLM_ENGINES="$processes"
    [[ -z "$FP8" ]] || FP8=emulated
    STEPS="${STEPS:-3}" EVAL_STEPS="$STEPS"
    SAMPLES_PER_PROMPT=4 PROMPTS_PER_STEP=8 TRAIN_BATCH=16 PROMPT_LENGTH=56 RESPONSE_LENGTH=8 MAX_TOKENS_PER_GPU=2048
    LEARNING_RATE=1e-4
    cache="$root/.cache/quickstart"
    MODEL="${CPU_MODEL:-$cache/tiny-model}"
    rows="$((STEPS * PROMPTS_PER_STEP))"
    data="$OUTPUT/data/$rows-prompts" # as another STEPS asks for others
    DATA="$data/train.jsonl" EVAL_DATA="$data/eval.jsonl"
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
}
if ! $dry_run; then
    # shellcheck source=examples/scripts/setup_env.sh
    source "$scripts/setup_env.sh"
    [[ -n "${CPU_MODEL:-}" ]] || python3 -m openrlhf_gtpo.cli.prepare tiny-model --output "$MODEL" >/dev/null
    python3 -m openrlhf_gtpo.cli.prepare task --preset smoke --label answer --train-size 75 --eval-size 24 \
        --train-rows "$rows" --output "$data" >/dev/null
fi
