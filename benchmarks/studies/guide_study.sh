#!/usr/bin/env bash
# The value of a guide if most groups fail: examples/experiments/guide.yaml, with its model, data and guide.
#
#   bash benchmarks/studies/guide_study.sh [STEPS]     steps of the guide's own training, 60 by default
#
# The guide is the policy's model after GRPO on other questions of the task. Run it again to resume after an interruption.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
model=.cache/quickstart/smollm2-135m-instruct data=runs/guide_data steps="${1:-60}"
python3 -m openrlhf_gtpo.cli.prepare smollm2 --output "$model"
# SmolLM2-135M answers few of these. It learns sums of two numbers of one or two digits (docs/results/study.md).
task=(--task chain_sum --task-config '{"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}' --system 'Answer briefly.'
    --question-form '{expression}' --example '21 + 13' 'The result is 34.')
python3 -m openrlhf_gtpo.cli.prepare task "${task[@]}" --train-size "$((240 + 4 * steps))" --eval-size 48 --output "$data/all"
head -n 240 "$data/all/train.jsonl" >"$data/train.jsonl"
tail -n +241 "$data/all/train.jsonl" >"$data/guide_train.jsonl"
cp "$data/all/eval.jsonl" "$data/eval.jsonl"

[[ -f $data/guide/config.json ]] || python3 -m openrlhf_gtpo.cli.train_ppo_ray \
    --actor.model_name_or_path "$model" --actor.num_gpus_per_node 1 --actor.adam.lr 1e-5 --actor.lr_scheduler constant \
    --actor.lr_warmup_ratio 0 --algo.preset grpo --algo.kl.init_coef 0 --vllm.num_engines 1 \
    --data.prompt_dataset "$data/guide_train.jsonl" --data.label_key scorer_label --data.apply_chat_template --data.max_len 512 \
    --reward.remote_url openrlhf_gtpo/tasks/reasoning_gym_reward.py --rollout.batch_size 4 --rollout.n_samples_per_prompt 8 \
    --rollout.max_new_tokens 24 --rollout.micro_batch_size 32 --train.batch_size 16 --train.micro_batch_size 16 \
    --ckpt.path "$data/checkpoints" --ckpt.load_enable --ckpt.save_steps 10 --ckpt.max_num 1 \
    --ckpt.best_metric_key none --ckpt.output_dir "$data/guide" --logger.metrics_path "$data/guide.jsonl"
exec python3 -m openrlhf_gtpo.cli.experiment examples/experiments/guide.yaml
