#!/usr/bin/env bash
# The runs behind docs/results/entropy_target.md: examples/experiments/entropy_target.yaml, one to two minutes each.
#
#   bash benchmarks/studies/entropy_target.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
# shellcheck source=benchmarks/studies/raw.sh
source benchmarks/studies/raw.sh
results=docs/results/entropy_target runs=runs/entropy_target
python3 -m openrlhf_gtpo.cli.prepare tiny-model --output .cache/quickstart/tiny-model
python3 -m openrlhf_gtpo.cli.prepare task --preset smoke --train-size 75 --eval-size 24 --train-rows 960 --output runs/entropy_target_data
python3 -m openrlhf_gtpo.cli.experiment examples/experiments/entropy_target.yaml
mkdir -p "$results"
mapfile -t kept < <(cd "$runs" && printf "%s\n" */*/seed-*/{flags.json,metrics.jsonl})
pack "$results/runs.tar.xz" "$runs" "${kept[@]}"
cp "$runs"/table.md "$runs"/curves.png "$results"
