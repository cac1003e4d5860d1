#!/usr/bin/env bash
# The long experiments behind docs/reliability.md; each writes its numbers to docs/results/reliability (or OUTPUT).
#
#   bash benchmarks/reliability/run_all.sh         some hours on two cores, without a GPU; KILLS=20 for a tenth of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
output="${OUTPUT:-docs/results/reliability}"
kills="${KILLS:-200}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$output"
run() { # SCRIPT ARGUMENTS…   all of them run, whatever becomes of one
    printf '[reliability] %s\n' "$1" >&2
    python3 -m "benchmarks.reliability.$1" "${@:2}" --output "$output/$1.json" || failed+=("$1")
}
failed=()
run checkpoint_kills --kills "$kills"
run resume_exact --kills "$((kills / 20 > 1 ? kills / 20 : 2))"
run in_flight
run engine_faults --faults "$((kills / 4))"
run rank_faults --rounds "$(((kills + 24) / 25))"
run shares --repeat 5
((${#failed[@]} == 0)) || {
    printf '[reliability] something was lost, or failed, in: %s\n' "${failed[*]}" >&2
    exit 1
}
