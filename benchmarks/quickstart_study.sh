#!/usr/bin/env bash
# The study behind docs/results/quickstart.md: the default quickstart with three estimators and three seeds.
#
#   bash benchmarks/quickstart_study.sh [ESTIMATOR ...]     default: gtpo grpo_s group_norm
#
# About ten minutes a run on two cores. Finished runs are kept: start it again to go on after an interruption. Metrics go to
# docs/results/quickstart/ESTIMATOR-seedN.jsonl, the comparison to docs/results/quickstart/{table.md,curves.png}.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
results=docs/results/quickstart
mkdir -p "$results"
estimators=("$@")
((${#estimators[@]} > 0)) || estimators=(gtpo grpo_s group_norm)

for seed in 1 2 3; do
    for estimator in "${estimators[@]}"; do
        kept="$results/$estimator-seed$seed.jsonl"
        [[ ! -e "$kept" ]] || continue
        output="runs/study-$estimator-seed$seed"
        rm -rf "$output"
        bash examples/scripts/quickstart.sh --estimator "$estimator" --seed "$seed" --output "$output"
        cp "$output/metrics.jsonl" "$kept"
        rm -rf "$output/model"
    done
done

runs=()
for kept in "$results"/*-seed[0-9]*.jsonl; do
    name="$(basename "$kept" .jsonl)"
    runs+=("${name%-seed*}=$kept")
done
python3 -m openrlhf_gtpo.cli.report compare "${runs[@]}" --png "$results/curves.png" --markdown "$results/table.md"
