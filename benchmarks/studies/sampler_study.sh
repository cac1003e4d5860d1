#!/usr/bin/env bash
# The study behind docs/results/sampler.md: what entropies from vLLM's sampler cost in a rollout and save in a step, and
# whether the quickstart learns equally well with them, over six seeds.
#
#   bash benchmarks/studies/sampler_study.sh
#
# About 80 minutes on two idle cores. Finished parts are kept: run it again to resume after an interruption. Results go to
# docs/results/sampler.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
# shellcheck source=benchmarks/studies/raw.sh
source benchmarks/studies/raw.sh
results=docs/results/sampler metrics=runs/sampler_study
model=.cache/quickstart/smollm2-135m-instruct
unpack "$results/runs.tar.xz" "$metrics"

for seed in {1..6}; do
    for entropy in actor sampler; do # in turns, so that other work on the machine meets both
        kept="$metrics/$entropy-seed$seed.jsonl" output="runs/sampler-study-$entropy-seed$seed"
        [[ ! -e "$kept" ]] || continue
        rm -rf "$output"
        flags=(--rollout.entropy "$entropy")
        [[ $entropy == actor ]] || flags+=(--rollout.entropy_audit_steps 5)
        bash examples/scripts/quickstart.sh --seed "$seed" --output "$output" -- "${flags[@]}"
        cp "$output/metrics.jsonl" "$kept"
        rm -rf "$output/model"
    done
done
runs=()
for entropy in actor sampler; do
    for seed in {1..6}; do runs+=("$entropy=$metrics/$entropy-seed$seed.jsonl"); done
done
pack "$results/runs.tar.xz" "$metrics" {actor,sampler}-seed{1..6}.jsonl
python3 -m openrlhf_gtpo.cli.report compare "${runs[@]}" --png "$results/curves.png" --markdown "$results/table.md"

[[ -e $results/rollout.json ]] ||
    python3 -m benchmarks.studies.sampler_entropy --model "$model" --output "$results/rollout.json" --rows 64 --tokens 24 --repeat 7

if [[ ! -e $results/megatron.json ]]; then
    task=runs/sampler-study-task
    rm -rf "$task"
    python3 -m openrlhf_gtpo.cli.prepare task --preset quickstart --train-size 75 --eval-size 24 --train-rows 48 --output "$task"
    python3 -m openrlhf_gtpo.cli.benchmark train --steps 2 --warmup 1 --repeat 2 \
        --compare actor="" --compare sampler="--rollout.entropy sampler" --output "$results/megatron.json" -- \
        --actor.backend megatron --train.max_tokens_per_gpu 2048 \
        --actor.model_name_or_path "$model" --actor.num_gpus_per_node 1 \
        --actor.adam.lr 2e-5 --actor.lr_warmup_ratio 0 --algo.advantage.estimator gtpo --algo.kl.init_coef 0 \
        --data.prompt_dataset "$task/train.jsonl" --data.input_key input --data.label_key scorer_label \
        --data.apply_chat_template --data.max_len 512 --reward.remote_url openrlhf_gtpo/tasks/reasoning_gym_reward.py \
        --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 32 --rollout.micro_batch_size 32 \
        --train.batch_size 128 --train.micro_batch_size 32 --train.seed 1 --vllm.num_engines 1
fi
