#!/usr/bin/env bash
# Trains with the settings of one of the presets in examples/scripts/presets.
#
#   bash examples/scripts/train.sh PRESET [--dry-run] [--cpu] [--submit URL] [--help] [-- FLAGS]
#
#   --dry-run       print the resolved command, one flag per line, and start nothing
#   --cpu           a small version of the same run, for a host without a GPU
#   --submit URL    submit the run to a Ray cluster (`ray job submit --address URL`) instead of starting Ray here
#   --help          the preset's description, then this text
#   -- FLAGS        flags for the trainer, which come last and win
#
# The environment overrides the preset, and the preset overrides the defaults in this file, which list every variable:
#   STEPS=20 MODEL=Qwen/Qwen2.5-14B bash examples/scripts/train.sh gtpo_colocated
#   ALGORITHM=grpo bash examples/scripts/train.sh gtpo_split      # a baseline, all else equal
#   SURROGATE=cispo bash examples/scripts/train.sh gtpo_split     # GTPO's credit, CISPO's clip
# The presets' data, made once:
#   python3 -m openrlhf_gtpo.cli.prepare math --source BytedTsinghua-SIA/DAPO-Math-17k --problem-key prompt \
#       --answer-key reward_model.ground_truth --eval-size 256 --output data/dapo_math
set -euo pipefail

root="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
name="$(basename "$0" .sh)" # or the name of benchmark_train.sh or the planner's script, if it sources this one

refuse() {
    printf '%s: %s\n' "$name" "$*" >&2
    exit 2
}

# Only benchmark_train.sh and the planner's script set these, when they source this file.
[[ "${BASH_SOURCE[0]}" != "$0" ]] || unset program planned
preset=''
if [[ "${1:--}" != -* ]]; then
    preset="$1"
    shift
fi
presets="$root/examples/scripts/presets"
preset_file="$presets/$preset.sh"
[[ "$name" != train || ! -f "$preset_file" ]] || name="train_$preset"

cpu=false dry_run=false submit=''
while (($# > 0)); do
    case "$1" in
        --cpu) cpu=true ;;
        --dry-run) dry_run=true ;;
        --submit)
            [[ -n "${2:-}" && "$2" != --* ]] || refuse "--submit needs the address of a Ray cluster's dashboard, such as http://127.0.0.1:8265."
            submit="$2"
            shift
            ;;
        --help | -h)
            for file in "$preset_file" "$0"; do
                [[ ! -f "$file" ]] || sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$file"
            done
            exit 0
            ;;
        --)
            shift
            break
            ;;
        *) refuse "unknown flag $1; known: --cpu --dry-run --submit --help, and -- before flags of the trainer." ;;
    esac
    shift
done

[[ -f "$preset_file" ]] || refuse "expected the name of a preset, one of: $(cd "$presets" && echo *.sh | sed 's/\.sh//g'); got '$preset'."
unread='' # variables that --cpu overrides
for variable in MODEL DATA EVAL_DATA EVAL_STEPS GPUS_PER_NODE CONTEXT_PARALLEL MAX_TOKENS_PER_GPU GUIDE_ENGINES GUIDE_TENSOR_PARALLEL \
    VLLM_ENGINES VLLM_TENSOR_PARALLEL VLLM_GPU_MEMORY VLLM_MAX_NUM_SEQS VLLM_MAX_NUM_BATCHED_TOKENS \
    SAMPLES_PER_PROMPT PROMPTS_PER_STEP TRAIN_BATCH PROMPT_LENGTH RESPONSE_LENGTH LEARNING_RATE; do
    [[ -z "${!variable:-}" ]] || unread+=" $variable"
done
variant="${ALGORITHM:+-$ALGORITHM}${SURROGATE:+-$SURROGATE}" # a variant of the preset gets its own folder
guided="${GUIDE_FRACTION:-}${GUIDE_STEPS:-}${GUIDE_ENGINES:-}${GUIDE_TENSOR_PARALLEL:-}${RESCUE_BATCH:-}" # as set by the user
audit="${FP8_AUDIT_STEPS:-0}" # as set by the user; a preset's own needs FP8 and an ALGORITHM with entropies
# shellcheck source=examples/scripts/presets/gtpo_colocated.sh
source "$preset_file"
ALGORITHM="${ALGORITHM:-gtpo}"         # gtpo, grpo_s, grpo, dapo, gspo, dr_grpo, rloo, forking_tokens, entropy_bonus
SURROGATE="${SURROGATE:-}"             # cispo, sapo, gmpo, gspo_token, clip_cov, kl_cov, stare, hapo, htpo; empty for the algorithm's own
PLACEMENT="${PLACEMENT:-colocated}"    # colocated, split
ASYNC="${ASYNC:-}"                     # 1, with split: engines sample the next rollout while this one trains; empty: in turn
GUIDE="${GUIDE:-}"                     # a stronger model that samples too, on GPUs as PLACEMENT says; empty: none
GUIDE_FRACTION="${GUIDE_FRACTION:-0.25}" # the guide's share of each prompt's responses
GUIDE_STEPS="${GUIDE_STEPS:-0}"        # steps in which that falls to zero; 0: never
GUIDE_ENGINES="${GUIDE_ENGINES:-1}"
GUIDE_TENSOR_PARALLEL="${GUIDE_TENSOR_PARALLEL:-1}"
RESCUE_BATCH="${RESCUE_BATCH:-0}"      # always failing prompts that the guide answers at once; 0: none

MODEL="${MODEL:-Qwen/Qwen2.5-7B}"      # a name on the Hugging Face hub, or a folder
[[ -n "${DATA:-}" ]] || EVAL_DATA="${EVAL_DATA-data/dapo_math/eval.jsonl}"
DATA="${DATA:-data/dapo_math/train.jsonl}"
EVAL_DATA="${EVAL_DATA:-}"             # default: the default DATA's, none for your own DATA; empty: no evaluation
EVAL_STEPS="${EVAL_STEPS:-20}"
REWARD="${REWARD:-$root/openrlhf_gtpo/tasks/math_verify_reward.py}" # or your own file, or a server's URL
OUTPUT="${OUTPUT:-$root/runs/$name$variant$(! $cpu || printf -- -cpu)}"
STEPS="${STEPS:-}"                     # batches of prompts (dynamic sampling may use several a step); empty: one pass over the data
SAVE_STEPS="${SAVE_STEPS:-20}"

NODES="${NODES:-1}"                    # for training
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR_PARALLEL="${TENSOR_PARALLEL:-2}"
PIPELINE_PARALLEL="${PIPELINE_PARALLEL:-1}"
CONTEXT_PARALLEL="${CONTEXT_PARALLEL:-1}"
FP8="${FP8:-}"                         # hybrid: FP8 products on Hopper; empty: BF16
FP8_RECIPE="${FP8_RECIPE:-blockwise}"  # delayed, tensorwise
FP8_PARAM="${FP8_PARAM:-}"             # 1: the decoder's weights only in FP8, in half the memory (not with delayed)
FP8_AUDIT_STEPS="${FP8_AUDIT_STEPS:-0}" # compare every N-th batch with BF16; 0: never
RECOMPUTE="${RECOMPUTE:-none}"         # selective (the MLP) and full save memory but are slower (see cli.plan)
LORA_RANK="${LORA_RANK:-}"             # train adapters of this rank (docs/lora.md); empty: all weights
MAX_TOKENS_PER_GPU="${MAX_TOKENS_PER_GPU:-12288}"
VLLM_ENGINES="${VLLM_ENGINES:-}"       # default: colocated, enough to fill the GPUs; split, 4
VLLM_TENSOR_PARALLEL="${VLLM_TENSOR_PARALLEL:-2}"
VLLM_GPU_MEMORY="${VLLM_GPU_MEMORY:-}" # default: split, 0.9; colocated, 0.6, or 0.4 with a guide, whose engines need as much
VLLM_MAX_NUM_SEQS="${VLLM_MAX_NUM_SEQS:-1024}" # responses that an engine decodes at once (vLLM's own: 128); as planned
VLLM_MAX_NUM_BATCHED_TOKENS="${VLLM_MAX_NUM_BATCHED_TOKENS:-8192}" # and tokens in a step, including prompts (2048)

SAMPLES_PER_PROMPT="${SAMPLES_PER_PROMPT:-16}" # G
PROMPTS_PER_STEP="${PROMPTS_PER_STEP:-128}"
TRAIN_BATCH="${TRAIN_BATCH:-128}"      # responses per optimizer step; 2048 makes one on-policy update of each rollout
PROMPT_LENGTH="${PROMPT_LENGTH:-2048}"
RESPONSE_LENGTH="${RESPONSE_LENGTH:-4096}"
LEARNING_RATE="${LEARNING_RATE:-$([[ -z "$LORA_RANK" ]] && printf 1e-6 || printf 1e-5)}"

check_counts() {
    local variable
    for variable in "$@"; do
        [[ "${!variable}" =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$variable is '${!variable}'; it must be a number from 1 to 999999999."
    done
}

check_counts NODES GPUS_PER_NODE TENSOR_PARALLEL PIPELINE_PARALLEL CONTEXT_PARALLEL VLLM_TENSOR_PARALLEL VLLM_MAX_NUM_SEQS \
    VLLM_MAX_NUM_BATCHED_TOKENS SAMPLES_PER_PROMPT PROMPTS_PER_STEP TRAIN_BATCH PROMPT_LENGTH RESPONSE_LENGTH MAX_TOKENS_PER_GPU \
    EVAL_STEPS GUIDE_ENGINES GUIDE_TENSOR_PARALLEL
[[ "$PLACEMENT" != colocated ]] || : "${VLLM_ENGINES:=$((NODES * GPUS_PER_NODE / VLLM_TENSOR_PARALLEL))}"
[[ "${VLLM_ENGINES:=4}" != 0 ]] || VLLM_ENGINES=1 # then the trainer reports that an engine has too few GPUs
check_counts VLLM_ENGINES
if [[ "$PLACEMENT" == split ]]; then : "${VLLM_GPU_MEMORY:=0.9}"; elif [[ -n "$GUIDE" ]]; then : "${VLLM_GPU_MEMORY:=0.4}"; fi
: "${VLLM_GPU_MEMORY:=0.6}"
for variable in GUIDE_STEPS RESCUE_BATCH FP8_AUDIT_STEPS; do
    [[ "${!variable}" =~ ^[0-9]{1,9}$ ]] || refuse "$variable is '${!variable}'; it must be a number from 0 to 999999999."
done
[[ "$STEPS" =~ ^([1-9][0-9]{0,8})?$ ]] || refuse "STEPS is '$STEPS'; it must be a number from 1 to 999999999, or empty for one pass over the data."
[[ "$SAVE_STEPS" =~ ^(-1|[1-9][0-9]{0,8})$ ]] || refuse "SAVE_STEPS is '$SAVE_STEPS'; it must be a number from 1 to 999999999, or -1 for never."
[[ "$ALGORITHM" =~ ^(gtpo|grpo_s|grpo|dapo|gspo|dr_grpo|rloo|forking_tokens|entropy_bonus)$ ]] || refuse "ALGORITHM is '$ALGORITHM'; it must be gtpo, grpo_s, grpo, dapo, gspo, dr_grpo, rloo, forking_tokens or entropy_bonus."
[[ "$SURROGATE" =~ ^(cispo|sapo|gmpo|gspo_token|clip_cov|kl_cov|stare|hapo|htpo)?$ ]] || refuse "SURROGATE is '$SURROGATE'; it must be cispo, sapo, gmpo, gspo_token, clip_cov, kl_cov, stare, hapo or htpo, or empty for the algorithm's own."
[[ "$PLACEMENT" == colocated || "$PLACEMENT" == split ]] || refuse "PLACEMENT is '$PLACEMENT'; it must be colocated or split."
[[ "$ASYNC" =~ ^1?$ ]] || refuse "ASYNC is '$ASYNC'; it must be 1 or empty."
[[ -z "$ASYNC" || "$PLACEMENT" == split ]] || refuse "ASYNC=1 needs PLACEMENT=split: colocated engines take turns with the trainer."
[[ "$FP8" =~ ^(hybrid|e4m3|emulated)?$ ]] || refuse "FP8 is '$FP8'; it must be hybrid or e4m3, or empty for BF16."
[[ "$FP8_RECIPE" =~ ^(blockwise|tensorwise|delayed)$ ]] || refuse "FP8_RECIPE is '$FP8_RECIPE'; it must be blockwise, tensorwise or delayed."
[[ "$FP8_PARAM" =~ ^1?$ ]] || refuse "FP8_PARAM is '$FP8_PARAM'; it must be 1 or empty."
[[ -n "$FP8" || "$FP8_RECIPE$FP8_PARAM" == blockwise ]] || refuse "FP8_RECIPE and FP8_PARAM need FP8, such as FP8=hybrid."
with_entropies='^(gtpo|grpo_s|forking_tokens|entropy_bonus)$'
[[ "$audit" == 0 || -n "$FP8" && "$ALGORITHM" =~ $with_entropies ]] ||
    refuse "FP8_AUDIT_STEPS=$audit compares entropies in FP8 and BF16; it needs FP8, such as FP8=hybrid, and gtpo, grpo_s, forking_tokens or entropy_bonus as ALGORITHM."
[[ -z "$ASYNC" || "$audit" == 0 ]] || refuse "FP8_AUDIT_STEPS=$audit audits the actor's entropies, but ASYNC=1 uses the sampler's; leave one of them out."
[[ -n "$GUIDE" || -z "$guided" ]] ||
    refuse "GUIDE_FRACTION, GUIDE_STEPS, GUIDE_ENGINES, GUIDE_TENSOR_PARALLEL and RESCUE_BATCH need GUIDE; set it to the guiding model."
[[ "$RECOMPUTE" =~ ^(none|selective|full)$ ]] || refuse "RECOMPUTE is '$RECOMPUTE'; it must be none, selective or full."
[[ "$LORA_RANK" =~ ^([1-9][0-9]{0,8})?$ ]] || refuse "LORA_RANK is '$LORA_RANK'; it must be a number from 1 to 999999999, or empty for all weights."
OUTPUT="$(realpath -m -- "$OUTPUT")"
[[ ! -e "$OUTPUT" || -d "$OUTPUT" ]] || refuse "OUTPUT=$OUTPUT is a file; it must be a folder."

if $cpu; then
    # On two cores this takes a minute or two: a 2-layer model made on the spot (or CPU_MODEL=DIR) and one-digit products,
    # with rewards from REWARD. Algorithm, placement, backend and kind of layout stay: tensor and pipeline parallelism
    # and nodes become at most 2, context parallelism 1, FP8 is emulated, and there are as many colocated
    # engines as training processes; a split run has one engine.
    [[ -z "$unread" ]] || printf '%s: --cpu sets its own%s.\n' "$name" "$unread" >&2
    ((TENSOR_PARALLEL <= 2)) || TENSOR_PARALLEL=2
    ((PIPELINE_PARALLEL <= 2)) || PIPELINE_PARALLEL=2
    CONTEXT_PARALLEL=1 processes="$((TENSOR_PARALLEL * PIPELINE_PARALLEL))"
    NODES="$((NODES > 1 && processes > 1 ? 2 : 1))"
    GPUS_PER_NODE="$((processes / NODES))"
    VLLM_TENSOR_PARALLEL=1 VLLM_ENGINES=1 VLLM_GPU_MEMORY=0.2 VLLM_MAX_NUM_SEQS=128 VLLM_MAX_NUM_BATCHED_TOKENS=2048
    [[ "$PLACEMENT" == split ]] || VLLM_ENGINES="$processes"
    [[ -z "$FP8" ]] || FP8=emulated
    GUIDE_ENGINES=1 GUIDE_TENSOR_PARALLEL=1 RESCUE_BATCH="$((RESCUE_BATCH > 2 ? 2 : RESCUE_BATCH))"
    STEPS="${STEPS:-3}" EVAL_STEPS="${STEPS:-3}"
    SAMPLES_PER_PROMPT=4 PROMPTS_PER_STEP=8 TRAIN_BATCH=16 PROMPT_LENGTH=56 RESPONSE_LENGTH=8 MAX_TOKENS_PER_GPU=2048
    LEARNING_RATE=1e-4
    MODEL="${CPU_MODEL:-$root/.cache/quickstart/tiny-model}"
    GUIDE="${GUIDE:+$MODEL}"
    rows="$((STEPS * PROMPTS_PER_STEP))"
    task="$OUTPUT/data/$rows-prompts" # another STEPS needs other prompts
    DATA="$task/train.jsonl" EVAL_DATA="$task/eval.jsonl"
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
    if ! $dry_run; then
        # shellcheck source=examples/scripts/setup_env.sh
        source "$root/examples/scripts/setup_env.sh"
        [[ -n "${CPU_MODEL:-}" ]] || python3 -m openrlhf_gtpo.cli.prepare tiny-model --output "$MODEL" >/dev/null
        python3 -m openrlhf_gtpo.cli.prepare task --preset smoke --train-size 75 --eval-size 24 \
            --train-rows "$rows" --output "$task" >/dev/null
    fi
fi

case "$ALGORITHM" in
    # --algo.gtpo.variant v1|v1_clipped|v2, --algo.gtpo.compare response|group, --algo.grpo_s.ratio_mean geometric, …
    gtpo) algorithm_args=(--algo.advantage.estimator gtpo --algo.kl.init_coef 0 --algo.gtpo.alpha1 1.0 --algo.gtpo.alpha2 0.1) ;;
    grpo_s) algorithm_args=(--algo.advantage.estimator grpo_s --algo.kl.init_coef 0 --algo.grpo_s.beta1 1.0 --algo.grpo_s.beta2 0.1) ;;
    dr_grpo | rloo | forking_tokens | entropy_bonus) algorithm_args=(--algo.advantage.estimator "$ALGORITHM" --algo.kl.init_coef 0) ;;
    dapo | gspo) algorithm_args=(--algo.preset "$ALGORITHM") ;;
    # No KL term, as for the others. It would need --algo.kl.init_coef 0.04 and GPUs for the reference model, --ref.*
    grpo) algorithm_args=(--algo.preset grpo --algo.kl.init_coef 0) ;;
esac
if [[ -n "$SURROGATE" ]]; then
    algorithm_args+=(--actor.policy_loss_type "$SURROGATE") # it has its own clip range
elif [[ "$ALGORITHM" != gspo ]]; then # gspo's clip range fits its own ratio
    algorithm_args+=(--actor.eps_clip_low_high 0.2 0.28)
fi

# A job on a Ray cluster starts in one of the cluster's folders, so paths must be absolute.
absolute() { if [[ -e "$1" ]]; then realpath "$1"; else printf '%s' "$1"; fi; }
model_args=(
    --actor.model_name_or_path "$(absolute "$MODEL")"
    --actor.adam.lr "$LEARNING_RATE"
    --actor.lr_scheduler constant
    --actor.lr_warmup_ratio 0 # a warm-up spends the first step at learning rate 0 (transformers, optimization.py)
)
data_args=(
    --data.prompt_dataset "$(absolute "$DATA")"
    --data.input_key input
    --data.label_key label
    --data.apply_chat_template
    --data.max_len "$((PROMPT_LENGTH + RESPONSE_LENGTH))"
    --reward.remote_url "$(absolute "$REWARD")"
)
[[ -z "$STEPS" ]] || data_args+=(--data.max_samples "$((STEPS * PROMPTS_PER_STEP))")
# --train.num_episodes 3                 several passes over the data
# --train.agent_func_path AGENT.py       multi-turn, instead of --reward.remote_url
# --reward.overlong_buffer_len 1024      DAPO's length penalty (part of the dapo preset)
rollout_args=(
    --rollout.batch_size "$PROMPTS_PER_STEP"
    --rollout.n_samples_per_prompt "$SAMPLES_PER_PROMPT"
    --rollout.max_new_tokens "$RESPONSE_LENGTH"
    --rollout.temperature 1.0
    --vllm.num_engines "$VLLM_ENGINES"
    --vllm.tensor_parallel_size "$VLLM_TENSOR_PARALLEL"
    --vllm.gpu_memory_utilization "$VLLM_GPU_MEMORY"
    --vllm.max_num_seqs "$VLLM_MAX_NUM_SEQS"
    --vllm.max_num_batched_tokens "$VLLM_MAX_NUM_BATCHED_TOKENS"
    --vllm.enable_prefix_caching
)
if [[ -n "$ASYNC" ]]; then
    rollout_args+=(
        --train.async_enable
        # A token's weight is min(ratio, 5), a response's is their mean; gspo has none (docs/algorithms.md).
        --algo.advantage.is_correction_level token
        --algo.advantage.is_correction_mode clip
        --algo.advantage.is_correction_threshold 5
    )
    [[ ! "$ALGORITHM" =~ $with_entropies ]] || rollout_args+=(--rollout.entropy sampler)
fi
# --rollout.entropy sampler              skip the old-policy forward pass, if a rollout has one optimizer step
# --vllm.sync_bucket_mb 1024             larger buckets for the weight transfer
# --vllm.sync_checksum                   prove that every weight arrived
guide_args=()
if [[ -n "$GUIDE" ]]; then
    guide_args=(
        --algo.guide.model_name_or_path "$(absolute "$GUIDE")"
        --algo.guide.fraction "$GUIDE_FRACTION"
        --algo.guide.steps "$GUIDE_STEPS"
        --algo.guide.num_engines "$GUIDE_ENGINES"
        --algo.guide.tensor_parallel_size "$GUIDE_TENSOR_PARALLEL"
    )
    [[ "$RESCUE_BATCH" == 0 ]] || guide_args+=(--algo.guide.rescue_batch "$RESCUE_BATCH" --algo.dynamic_filtering_enable)
fi
train_args=(
    --train.batch_size "$TRAIN_BATCH"
    --train.max_epochs 1
    --train.max_tokens_per_gpu "$MAX_TOKENS_PER_GPU"
    --actor.num_nodes "$NODES"
    --actor.num_gpus_per_node "$GPUS_PER_NODE"
    --actor.backend megatron
    --megatron.tensor_model_parallel_size "$TENSOR_PARALLEL"
    --megatron.pipeline_model_parallel_size "$PIPELINE_PARALLEL"
    --megatron.context_parallel_size "$CONTEXT_PARALLEL"
    --megatron.recompute "$RECOMPUTE"
)
# --megatron.override FIELD=VALUE        any field of Megatron's TransformerConfig
((TENSOR_PARALLEL == 1)) || train_args+=(--megatron.sequence_parallel)
if [[ -n "$FP8" ]]; then
    train_args+=(--megatron.fp8 "$FP8" --megatron.fp8_recipe "$FP8_RECIPE")
    [[ ! "$ALGORITHM" =~ $with_entropies ]] || train_args+=(--megatron.fp8_audit_steps "$FP8_AUDIT_STEPS")
fi
[[ -z "$LORA_RANK" ]] || train_args+=(--ds.lora.rank "$LORA_RANK" --ds.lora.alpha "$((2 * LORA_RANK))")
[[ -z "$FP8_PARAM" ]] || train_args+=(--megatron.fp8_param)
# --megatron.fp8_audit_gate 0.02         use BF16 entropies while FP8 changes more advantage signs than this
placement_args=()
if [[ "$PLACEMENT" == colocated ]]; then
    # Trainer and engines share the GPUs and take turns: the idle one releases its memory.
    placement_args+=(--train.colocate_all --vllm.enable_sleep --megatron.offload)
fi
log_args=(
    --logger.metrics_path "$OUTPUT/metrics.jsonl"
    --logger.tensorboard_dir "$OUTPUT/tensorboard"
    --logger.entropy_enable # also for the baselines
    --ckpt.output_dir "$OUTPUT/model"
    --ckpt.path "$OUTPUT/checkpoints"
    --ckpt.save_steps "$SAVE_STEPS"
    --ckpt.max_num 2
    --ckpt.load_enable # resumes from the newest checkpoint, if there is one
    --ckpt.best_metric_key none
)
# --logger.wandb.key WANDB_API_KEY --logger.wandb.project NAME     literally this word; the key is in the environment
if [[ -n "$EVAL_DATA" ]]; then
    log_args+=(--eval.dataset "$(absolute "$EVAL_DATA")" --eval.steps "$EVAL_STEPS" --eval.before_training)
    log_args+=(--eval.n_samples_per_prompt 4 --eval.temperature 1.0)
fi

# benchmark_train.sh sources this with program set to the benchmark, up to the trainer's flags.
command=("$(command -v python3 || printf python3)" -m "${program[@]:-openrlhf_gtpo.cli.train_ppo_ray}")
# The planner's script sets planned to flags of the trainer.
# shellcheck disable=SC2154
words=("${algorithm_args[@]}" "${model_args[@]}" "${data_args[@]}" "${rollout_args[@]}" "${guide_args[@]}" "${train_args[@]}"
    "${placement_args[@]}" "${log_args[@]}" "${planned[@]}" "$@")
if [[ -n "$submit" ]]; then
    # Ray quotes a job's words as for Windows, in double quotes if there is a space, but sh reads them (ray 2.55.0,
    # dashboard/modules/job/cli.py, list2cmdline). An empty $( ) has one, and keeps each \ away from a quote.
    job=()
    for word in "${command[@]}" "${words[@]}"; do
        if [[ "$word" == *[!A-Za-z0-9_.,:/=@%+\ -]* ]]; then
            # shellcheck disable=SC2016
            word="$(printf '%s.' "$word" | sed 's/[\\$`]/\\&$( )/g')" # the dot keeps trailing newlines
            word="${word%.}\$( )"
        fi
        job+=("$word")
    done
    # Otherwise RAY_ADDRESS would override --address, and a proxy would get requests for 127.0.0.1.
    command=(env RAY_API_SERVER_ADDRESS="$submit" no_proxy='*' ray job submit --address "$submit" --)
    words=("${job[@]}")
fi
missing=''
for variable in EVAL_DATA DATA; do
    file="${!variable}"
    [[ -e "$file" || ! "$file" =~ ^[^,]*\.(jsonl|json|csv|parquet)$ ]] || missing="$variable=$file does not exist; bash examples/scripts/train.sh --help shows how to make it."
done
if $dry_run; then
    printf -v line ' %q' "${command[@]}"
    for word in "${words[@]}"; do
        [[ "$word" != --* ]] || line+=$' \\\n   '
        printf -v word ' %q' "$word"
        line+="$word"
    done
    printf '%s\n' "${line:1}"
    [[ -z "$missing" ]] || $cpu || printf '%s: %s\n' "$name" "$missing" >&2
    exit 0
fi
[[ -z "$missing" ]] || refuse "$missing"
mkdir -p "$OUTPUT" 2>/dev/null || refuse "OUTPUT=$OUTPUT cannot be created; name another folder."
if $cpu && [[ -z "$submit${program[*]:-}" ]]; then
    # shellcheck source=examples/scripts/watched_run.sh
    source "$root/examples/scripts/watched_run.sh"
    printf '[%s] %s, %s steps; log: %s\n' "$name" "$ALGORITHM" "$STEPS" "$OUTPUT/train.log" >&2
    run_watched "$name" 'the same command' "$OUTPUT" "$STEPS" "${command[@]}" "${words[@]}"
    print_result "$OUTPUT" "$name, $ALGORITHM" 'What is 3 * 4?'
    exit 0
fi
exec "${command[@]}" "${words[@]}"
