#!/usr/bin/env bash
# The study behind docs/results/determinism.md: the smoke run with and without --train.full_determinism_enable, in turn.
#
#   bash benchmarks/determinism_study.sh
#
# About a minute a run on two cores, three runs each. Finished runs are kept: start it again to go on after an interruption.
# Metrics go to docs/results/determinism/smoke-{with,without}-N.jsonl.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
results=docs/results/determinism
mkdir -p "$results"

# study NAME TRAINER_FLAGS...: one smoke run, unless its metrics are there already
study() {
    local kept="$results/$1.jsonl" output="runs/determinism-$1"
    [[ ! -e "$kept" ]] || return 0
    rm -rf "$output"
    bash examples/scripts/quickstart.sh --smoke --output "$output" -- "${@:2}"
    cp "$output/metrics.jsonl" "$kept"
    rm -rf "$output"
}

for number in 1 2 3; do
    study "smoke-without-$number"
    study "smoke-with-$number" --train.full_determinism_enable
done
