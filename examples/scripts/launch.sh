#!/usr/bin/env bash
# Sourced by the train_*.sh scripts, after they have set the variables of their header: turns those into OpenRLHF's
# argument groups and starts the trainer. Flags, of each of those scripts:
#
#   --dry-run       print the resolved command, an argument group a line, and start nothing
#   --cpu           the small version of the same run for a host without a GPU: see cpu_version.sh
#   --submit URL    hand the run to a Ray cluster, `ray job submit --address URL`, instead of starting a Ray here
#   --help          the script's header
#   -- FLAGS        anything of the trainer's, after all that the script says
#
# Every variable of a header can also come from the environment: STEPS=20 MODEL=… bash train_gtpo_colocated.sh

scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$scripts/../.." && pwd)"
name="$(basename "$0" .sh)"

refuse() {
    printf '%s: %s\n' "$name" "$*" >&2
    exit 2
}

cpu=false dry_run=false submit=''
while (($# > 0)); do
    case "$1" in
        --cpu) cpu=true ;;
        --dry-run) dry_run=true ;;
        --submit)
            (($# > 1)) || refuse "--submit needs the address of a Ray cluster's dashboard, such as http://127.0.0.1:8265."
            submit="$2"
            shift
            ;;
        --help | -h)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
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

for variable in NODES GPUS_PER_NODE TENSOR_PARALLEL PIPELINE_PARALLEL CONTEXT_PARALLEL VLLM_ENGINES VLLM_TENSOR_PARALLEL \
    SAMPLES_PER_PROMPT PROMPTS_PER_STEP TRAIN_BATCH PROMPT_LENGTH RESPONSE_LENGTH MAX_TOKENS_PER_GPU EVAL_STEPS; do
    [[ "${!variable:-}" =~ ^[1-9][0-9]*$ ]] || refuse "$variable is '${!variable:-}'; it must be a positive number."
done
[[ "${STEPS:=}" =~ ^([1-9][0-9]*)?$ ]] || refuse "STEPS is '$STEPS'; it must be a positive number, or empty for one pass over the data."
[[ "${SAVE_STEPS:=}" =~ ^(-1|[1-9][0-9]*)$ ]] || refuse "SAVE_STEPS is '$SAVE_STEPS'; it must be a positive number, or -1 for never."
[[ "$PLACEMENT" == colocated || "$PLACEMENT" == split ]] || refuse "PLACEMENT is '$PLACEMENT'; it must be colocated or split."
OUTPUT="$(realpath -m "${OUTPUT:-$root/runs/$name$($cpu && printf -- -cpu)}")"
if $cpu; then
    # shellcheck source=examples/scripts/cpu_version.sh
    source "$scripts/cpu_version.sh"
fi

case "$ALGORITHM" in
    gtpo | grpo_s) algorithm_args=(--algo.advantage.estimator "$ALGORITHM" --algo.kl.init_coef 0) ;;
    dapo | gspo) algorithm_args=(--algo.preset "$ALGORITHM") ;;
    # No KL term here, as with the others: one needs --algo.kl.init_coef 0.04 and GPUs for the reference model, --ref.*
    grpo) algorithm_args=(--algo.preset grpo --algo.kl.init_coef 0) ;;
    *) refuse "ALGORITHM is '$ALGORITHM'; it must be gtpo, grpo_s, grpo, dapo or gspo." ;;
esac
# --algo.gtpo.variant v1|v1_clipped|v2, --algo.gtpo.compare response|group, --algo.grpo_s.ratio_mean geometric, …
case "$ALGORITHM" in
    gtpo) algorithm_args+=(--algo.gtpo.alpha1 1.0 --algo.gtpo.alpha2 0.1) ;;
    grpo_s) algorithm_args+=(--algo.grpo_s.beta1 1.0 --algo.grpo_s.beta2 0.1) ;;
esac
[[ "$ALGORITHM" == gspo ]] || algorithm_args+=(--actor.eps_clip_low_high 0.2 0.28) # GSPO's range belongs to its ratio

# A job of a Ray cluster starts in a folder of the cluster's own.
absolute() { if [[ -e "$1" ]]; then realpath "$1"; else printf '%s' "$1"; fi; }
model_args=(
    --actor.model_name_or_path "$(absolute "$MODEL")"
    --actor.adam.lr "$LEARNING_RATE"
    --actor.lr_scheduler constant
    --actor.lr_warmup_ratio 0 # OpenRLHF's warm-up spends the first step at learning rate 0
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
# --train.agent_func_path AGENT.py       multi-turn, in place of --reward.remote_url
# --reward.overlong_buffer_len 1024      DAPO's length penalty (the dapo preset brings it)
rollout_args=(
    --rollout.batch_size "$PROMPTS_PER_STEP"
    --rollout.n_samples_per_prompt "$SAMPLES_PER_PROMPT"
    --rollout.max_new_tokens "$RESPONSE_LENGTH"
    --rollout.temperature 1.0
    --vllm.num_engines "$VLLM_ENGINES"
    --vllm.tensor_parallel_size "$VLLM_TENSOR_PARALLEL"
    --vllm.gpu_memory_utilization "$VLLM_GPU_MEMORY"
    --vllm.enable_prefix_caching
)
# --vllm.sync_bucket_mb 1024             larger buckets of the weight transfer
# --vllm.sync_checksum                   prove that every weight arrived
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
    case "$ALGORITHM" in gtpo | grpo_s) train_args+=(--megatron.fp8_audit_steps "$FP8_AUDIT_STEPS") ;; esac
fi
[[ -z "$FP8_PARAM" ]] || train_args+=(--megatron.fp8_param)
# --megatron.fp8_audit_gate 0.02         old-policy forward in BF16 while FP8 changes more signs of advantages than this
placement_args=()
if [[ "$PLACEMENT" == colocated ]]; then
    # Trainer and engines share the GPUs and take turns: while one works, the other's memory is given back.
    placement_args+=(--train.colocate_all --vllm.enable_sleep --megatron.offload)
fi
log_args=(
    --logger.metrics_path "$OUTPUT/metrics.jsonl"
    --logger.tensorboard_dir "$OUTPUT/tensorboard"
    --logger.entropy_enable # the baselines' entropies too
    --ckpt.output_dir "$OUTPUT/model"
    --ckpt.path "$OUTPUT/checkpoints"
    --ckpt.save_steps "$SAVE_STEPS"
    --ckpt.max_num 2
    --ckpt.load_enable # goes on from the newest checkpoint, where there is one
    --ckpt.best_metric_key none
)
# --logger.wandb.key KEY --logger.wandb.project NAME
if [[ -n "$EVAL_DATA" ]]; then
    log_args+=(--eval.dataset "$(absolute "$EVAL_DATA")" --eval.steps "$EVAL_STEPS" --eval.before_training)
    log_args+=(--eval.n_samples_per_prompt 4 --eval.temperature 1.0)
fi

# benchmark_train.sh has set the program: the benchmark, up to the trainer's flags.
command=("$(command -v python3 || printf python3)" -m "${program[@]:-openrlhf_gtpo.cli.train_ppo_ray}")
[[ -z "$submit" ]] || command=(ray job submit --address "$submit" -- "${command[@]}")

if $dry_run; then
    words() {
        local text=''
        (($# == 0)) || printf -v text ' %q' "$@"
        printf '%s' "$text"
    }
    line="$(words "${command[@]}")"
    printf '%s' "${line:1}"
    for group in algorithm_args model_args data_args rollout_args train_args placement_args log_args; do
        declare -n group_args="$group"
        ((${#group_args[@]} == 0)) || printf ' \\\n  %s' "$(words "${group_args[@]}")"
    done
    (($# == 0)) || printf ' \\\n  %s' "$(words "$@")"
    printf '\n'
    exit 0
fi

[[ -e "$DATA" || ! "$DATA" =~ \.(jsonl|json|csv|parquet)$ ]] || refuse "DATA=$DATA is not there; the header of train_gtpo_colocated.sh says how it is made."
mkdir -p "$OUTPUT" 2>/dev/null || refuse "OUTPUT=$OUTPUT cannot be made."
exec "${command[@]}" "${algorithm_args[@]}" "${model_args[@]}" "${data_args[@]}" "${rollout_args[@]}" "${train_args[@]}" \
    "${placement_args[@]}" "${log_args[@]}" "$@"
