#!/usr/bin/env bash
# Trains a small language model with GTPO, using OpenRLHF, Ray, vLLM and DeepSpeed or Megatron, on a CPU or one GPU.
#
#   bash examples/scripts/quickstart.sh                     SmolLM2-135M-Instruct on one-digit products, 6 to 10 minutes
#   bash examples/scripts/quickstart.sh --gpu               the same on one NVIDIA GPU; all flags below work there, too
#   bash examples/scripts/quickstart.sh --smoke             a tiny model made on the spot, about 90 seconds
#   bash examples/scripts/quickstart.sh --moe               the same with a tiny mixture of experts (docs/moe.md)
#   bash examples/scripts/quickstart.sh --estimator grpo_s  or group_norm, rloo, forking_tokens, …
#   bash examples/scripts/quickstart.sh --task gcd          another reasoning-gym task; --task-config '{"max_value": 50}'
#   bash examples/scripts/quickstart.sh --model DIR         another Hugging Face checkpoint
#   bash examples/scripts/quickstart.sh --reward FILE.py    your own reward function
#   bash examples/scripts/quickstart.sh --backend megatron --tensor-parallel 3 --pipeline-parallel 2
#   bash examples/scripts/quickstart.sh --moe --backend megatron --tensor-parallel 2 --expert-parallel 2
#   bash examples/scripts/quickstart.sh --steps 40 --seed 2 --output DIR -- --actor.adam.lr 5e-6
#   bash examples/scripts/quickstart.sh --resume            with the same flags: continues an interrupted run
#
# Arguments after -- go to the trainer. Results: DIR/metrics.jsonl, DIR/curves.png, DIR/model; the log is
# DIR/train.log. The model is made once and kept in .cache/quickstart; the task's files are in DIR/data.
#
# --gpu uses the active environment if that has vLLM, OpenRLHF and a torch for CUDA (as the CUDA image has), and
# otherwise .venv-cuda, which setup_env.sh --cuda makes from wheels. Trainer and engine take turns on the GPU.

set -euo pipefail
root="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
from="$PWD"
cd "$root"

estimator=gtpo steps='' seed=1 task='' task_config='' model='' reward='' output='' smoke=false moe=false resume=false gpu=false
backend=deepspeed tensor_parallel=1 pipeline_parallel=1 expert_parallel=1
refuse() {
    printf 'quickstart: %s\n' "$*" >&2
    exit 2
}
while (($# > 0)); do
    case "$1" in
        --smoke) smoke=true ;;
        --moe) smoke=true moe=true ;;
        --gpu) gpu=true ;;
        --resume) resume=true ;;
        --estimator | --steps | --seed | --task | --task-config | --model | --reward | --output | \
            --backend | --tensor-parallel | --pipeline-parallel | --expert-parallel)
            [[ -n "${2:-}" && "$2" != --* ]] || refuse "$1 needs a value."
            name="${1#--}"
            printf -v "${name//-/_}" '%s' "$2"
            shift
            ;;
        --help | -h)
            sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        *) refuse "unknown flag $1; known: --gpu --smoke --moe --resume --estimator --steps --seed --task --task-config --model --reward --output --backend --tensor-parallel --pipeline-parallel --expert-parallel, and -- before flags of the trainer." ;;
    esac
    shift
done
[[ -z "$steps" || "$steps" =~ ^[1-9][0-9]{0,8}$ ]] || refuse "--steps $steps is not a number from 1 to 999999999."
[[ "$seed" =~ ^[0-9]{1,10}$ ]] || refuse "--seed $seed is not a number."
estimators="gae reinforce rloo reinforce_baseline group_norm dr_grpo flash_reinforce gtpo grpo_s forking_tokens entropy_bonus"
[[ " $estimators " == *" $estimator "* ]] || refuse "--estimator $estimator is none of $estimators."
[[ "$backend" == deepspeed || "$backend" == megatron ]] || refuse "--backend $backend is neither deepspeed nor megatron."
for size in "--tensor-parallel $tensor_parallel" "--pipeline-parallel $pipeline_parallel" "--expert-parallel $expert_parallel"; do
    [[ "${size#* }" =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$size is not a number from 1 to 999999999."
    [[ "$backend" == megatron || "${size#* }" == 1 ]] || refuse "$size needs --backend megatron."
done
processes=$((tensor_parallel * pipeline_parallel * expert_parallel))
if $gpu; then
    ((processes == 1)) || refuse "--gpu runs on one GPU; leave --tensor-parallel, --pipeline-parallel and --expert-parallel at 1."
    nvidia-smi -L >/dev/null 2>&1 || refuse "--gpu needs an NVIDIA GPU, but nvidia-smi finds none; leave it out to run on the CPU."
fi

for path in model reward output; do # relative to the caller's folder
    [[ -z "${!path}" || "${!path}" == *://* ]] || printf -v "$path" '%s' "$(cd "$from" && realpath -ms -- "${!path}")"
done
[[ -z "$model" || -e "$model" ]] || refuse "--model $model does not exist."
[[ -z "$reward" || "$reward" == *://* || -e "$reward" ]] || refuse "--reward $reward does not exist."
kind=quickstart
! $smoke || kind=smoke
name="$kind-$estimator-${task:-products}"
! $moe || name="$name-moe"
[[ "$backend" == deepspeed ]] || name="$name-megatron-tp$tensor_parallel-pp$pipeline_parallel"
((expert_parallel == 1)) || name="$name-ep$expert_parallel"
! $gpu || name="$name-gpu"
output="${output:-$root/runs/$name-seed$seed}"
if $resume; then
    [[ -e "$output/metrics.jsonl" ]] || refuse "$output holds no run to continue; leave out --resume."
elif [[ -e "$output/metrics.jsonl" ]]; then
    refuse "$output holds an earlier run; continue it with --resume, give --output another folder, or remove it."
fi
mkdir -p "$output" 2>/dev/null || refuse "--output $output cannot be created; name another folder."

fit='import importlib.util, torch
needed = [torch.version.cuda, *map(importlib.util.find_spec, ("openrlhf", "vllm"))]
raise SystemExit(not all(needed))'
if ! $gpu; then
    # shellcheck source=examples/scripts/setup_env.sh
    source examples/scripts/setup_env.sh
elif ! python3 -c "$fit" 2>/dev/null; then
    source examples/scripts/setup_env.sh --cuda
fi
# shellcheck source=examples/scripts/watched_run.sh
source examples/scripts/watched_run.sh
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# FlashInfer would compile its sampler with nvcc when the engine starts, but only --rollout.top_p uses it.
! $gpu || export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}"

if $smoke; then
    steps="${steps:-3}" prompts=8 samples=4 max_new_tokens=8 learning_rate=1e-4
    eval_samples=4 save_steps=1 maker=(tiny-model) cached=tiny-model
    ! $moe || maker+=(--moe) cached=tiny-moe
else
    steps="${steps:-10}" prompts=16 samples=8 max_new_tokens=32 learning_rate=2e-5
    eval_samples=16 save_steps=2 maker=(smollm2) cached=smollm2-135m-instruct
fi

if [[ -z "$model" ]]; then
    model="$root/.cache/quickstart/$cached"
    python3 -m openrlhf_gtpo.cli.prepare "${maker[@]}" --output "$model" >/dev/null
fi
data="$output/data"
question_args=(--train-size 75 --eval-size 24)
if [[ -z "$task" ]]; then
    question_args+=(--preset "$kind")
    task=products
else
    question_args+=(--task "$task")
fi
[[ -z "$task_config" ]] || question_args+=(--task-config "$task_config")
python3 -m openrlhf_gtpo.cli.prepare task "${question_args[@]}" --train-rows "$((steps * prompts))" --output "$data" >/dev/null
label_key=label
[[ -n "$reward" ]] || reward="$root/openrlhf_gtpo/tasks/reasoning_gym_reward.py" label_key=scorer_label

data_args=(
    --data.prompt_dataset "$data/train.jsonl"
    --eval.dataset "$data/eval.jsonl"
    --data.input_key input
    --data.label_key "$label_key"
    --data.apply_chat_template
    --data.max_len 512
    --reward.remote_url "$reward"
)
rollout_args=(
    --rollout.batch_size "$prompts"
    --rollout.n_samples_per_prompt "$samples"
    --rollout.max_new_tokens "$max_new_tokens"
    --rollout.micro_batch_size "$((32 / expert_parallel))"
    --rollout.entropy auto
    --vllm.num_engines 1
    --vllm.tensor_parallel_size 1
)
train_args=(
    --actor.model_name_or_path "$model"
    --actor.num_nodes 1
    --actor.num_gpus_per_node "$processes"
    --actor.adam.lr "$learning_rate"
    --actor.lr_warmup_ratio 0
    --algo.advantage.estimator "$estimator"
    --algo.kl.init_coef 0
    --train.batch_size "$((prompts * samples))"
    --train.micro_batch_size 32
    --train.seed "$seed"
)
if [[ "$backend" == megatron ]]; then
    train_args+=(
        --actor.backend megatron
        --megatron.tensor_model_parallel_size "$tensor_parallel"
        --megatron.pipeline_model_parallel_size "$pipeline_parallel"
        --megatron.expert_model_parallel_size "$expert_parallel"
        --train.max_tokens_per_gpu 2048
    )
    ((tensor_parallel == 1)) || ! $moe || train_args+=(--megatron.sequence_parallel) # experts need it
fi
if $gpu; then
    train_args+=(--train.colocate_all)
    [[ "$backend" == deepspeed ]] || train_args+=(--megatron.offload)
    # Enough for this model's weights, cache and CUDA graphs on a 16 GB card, beside the trainer's weights.
    rollout_args+=(--vllm.enable_sleep --vllm.gpu_memory_utilization 0.3)
fi
log_args=(
    --eval.before_training
    --eval.steps "$steps"
    --eval.temperature 1.0
    --eval.n_samples_per_prompt "$eval_samples"
    --logger.entropy_enable
    --logger.dump_rollouts 1
    --logger.metrics_path "$output/metrics.jsonl"
    --logger.tensorboard_dir "$output/tensorboard"
    --ckpt.output_dir "$output/model"
    --ckpt.path "$output/checkpoints"
    --ckpt.save_steps "$save_steps"
    --ckpt.max_num 2
    --ckpt.load_enable
    --ckpt.best_metric_key none
)

printf '[quickstart] %s on %s, %s steps; log: %s\n' "$estimator" "$task" "$steps" "$output/train.log" >&2
run_watched quickstart 'the same command with --resume' "$output" "$steps" \
    python3 -m openrlhf_gtpo.cli.train_ppo_ray "${train_args[@]}" "${data_args[@]}" "${rollout_args[@]}" "${log_args[@]}" "$@"
question='...'
[[ "$task" != products ]] || question='What is 3 * 4?'
print_result "$output" "$estimator on $task, seed $seed" "$question"
if $smoke; then
    printf 'A smoke run shows that the whole pipeline works; it is too short, and its model too small, to show learning.\n'
fi
