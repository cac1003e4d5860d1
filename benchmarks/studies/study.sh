#!/usr/bin/env bash
# The study behind docs/results/study.md: examples/experiments/study.yaml, in any number of pieces.
#
#   bash benchmarks/studies/study.sh
#
# About 10 minutes a run on two cores, 13 if they are busy. Run it again to resume after an interruption, also in a
# fresh clone: docs/results/study/runs.tar.xz keeps the raw files of finished runs, which are not repeated.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
# shellcheck source=benchmarks/studies/raw.sh
source benchmarks/studies/raw.sh
results=docs/results/study runs=runs/study
python3 -m openrlhf_gtpo.cli.prepare smollm2 --output .cache/quickstart/smollm2-135m-instruct
python3 -m openrlhf_gtpo.cli.prepare task --task chain_sum --task-config '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}' \
    --system "Answer briefly." --question-form '{expression}' --example '21 + 3' 'The result is 24.' \
    --train-size 160 --eval-size 48 --output runs/study_data
unpack "$results/runs.tar.xz" "$runs"

status=0
python3 -m openrlhf_gtpo.cli.experiment examples/experiments/study.yaml || status=$?
kept=()
for evaluated in "$runs"/*/seed-*/evaluation/flags.json; do # written last
    [[ -e $evaluated ]] || exit "$status" # none is finished
    run="${evaluated%/evaluation/*}"
    kept+=("${run#"$runs"/}"/{flags.json,metrics.jsonl,evaluation/{summary,scores,flags}.json})
    rm -rf "$run/model"
done
pack "$results/runs.tar.xz" "$runs" "${kept[@]}"
[[ ! -e $runs/report ]] || cp "$runs/report/policy_entropy.png" "$results" # a killed experiment has not made it
exit "$status"
