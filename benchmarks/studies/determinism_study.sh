#!/usr/bin/env bash
# The study behind docs/results/determinism.md: the smoke run with and without --train.full_determinism_enable, in turn.
#
#   bash benchmarks/studies/determinism_study.sh
#
# About a minute a run on two cores, three runs each. Finished runs are kept: run it again to resume after an interruption.
# Metrics (smoke-{with,without}-N.jsonl) go to docs/results/determinism/runs.tar.xz.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
# shellcheck source=benchmarks/studies/raw.sh
source benchmarks/studies/raw.sh
archive=docs/results/determinism/runs.tar.xz metrics=runs/determinism_study
unpack "$archive" "$metrics"

# study NAME TRAINER_FLAGS...: one smoke run, unless its metrics exist
study() {
    local kept="$metrics/$1.jsonl" output="runs/determinism-$1"
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
pack "$archive" "$metrics" smoke-with{,out}-{1..3}.jsonl
