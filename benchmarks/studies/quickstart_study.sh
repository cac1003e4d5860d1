#!/usr/bin/env bash
# The study behind docs/results/quickstart.md: the default quickstart with three estimators and three seeds, and GTPO on
# the Megatron actor at three layouts and in emulated FP8.
#
#   bash benchmarks/studies/quickstart_study.sh [ESTIMATOR ...]     default: gtpo grpo_s group_norm
#
# About ten minutes a run on two cores. Finished runs are kept: run it again to resume after an interruption. Metrics
# (ESTIMATOR-seedN.jsonl) go to docs/results/quickstart/runs.tar.xz, the comparison to table.md and curves.png beside it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
# shellcheck source=benchmarks/studies/raw.sh
source benchmarks/studies/raw.sh
results=docs/results/quickstart metrics=runs/quickstart_study
unpack "$results/runs.tar.xz" "$metrics"
estimators=("$@")
((${#estimators[@]} > 0)) || estimators=(gtpo grpo_s group_norm)

# study NAME SEED FLAGS...: one run of the quickstart, unless its metrics exist
study() {
    local name="$1" seed="$2" kept="$metrics/$1-seed$2.jsonl" output="runs/study-$1-seed$2"
    [[ ! -e "$kept" ]] || return 0
    rm -rf "$output"
    bash examples/scripts/quickstart.sh --seed "$seed" --output "$output" "${@:3}"
    cp "$output/metrics.jsonl" "$kept"
    rm -rf "$output/model"
}

actor=(-- --rollout.entropy actor) # the default when the first of these runs were made
for seed in 1 2 3; do
    for estimator in "${estimators[@]}"; do
        study "$estimator" "$seed" --estimator "$estimator" "${actor[@]}"
    done
done
# The same on Megatron. SmolLM2 has 9 heads and 3 KV heads, so TP is 1 or 3.
for seed in 1 2 3; do
    study gtpo_megatron "$seed" --backend megatron "${actor[@]}"
done
for seed in 1 2 3; do
    study gtpo_megatron_fp8 "$seed" --backend megatron "${actor[@]}" --megatron.fp8 emulated --megatron.fp8_audit_steps 3
done
study gtpo_megatron_pp2 1 --backend megatron --pipeline-parallel 2 "${actor[@]}"
study gtpo_megatron_tp3 1 --backend megatron --tensor-parallel 3 "${actor[@]}"

runs=() names=()
for kept in "$metrics"/*-seed[0-9]*.jsonl; do
    name="$(basename "$kept" .jsonl)"
    runs+=("${name%-seed*}=$kept")
    names+=("$name.jsonl")
done
pack "$results/runs.tar.xz" "$metrics" "${names[@]}"
python3 -m openrlhf_gtpo.cli.report compare "${runs[@]}" --png "$results/curves.png" --markdown "$results/table.md"
