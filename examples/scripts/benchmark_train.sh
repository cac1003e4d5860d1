#!/usr/bin/env bash
# Measures real training steps: seconds, tokens/s/GPU and share of each phase, MFU, idle time, memory.
#
#   bash examples/scripts/benchmark_train.sh                                   train.sh gtpo_colocated with its defaults
#   MEASURE=gtpo_split bash examples/scripts/benchmark_train.sh                another preset, or a planner's script
#   COMPARE='bf16=; fp8=--megatron.fp8 hybrid' bash examples/scripts/benchmark_train.sh         configurations in turn
#   COMPARE='tp2=; tp4=--megatron.tensor_model_parallel_size 4' bash …
#   LAUNCHER=examples/scripts/benchmark_train.sh sbatch examples/scripts/train_gtpo_slurm.sh    on a SLURM cluster
#
# --dry-run, --cpu, --submit URL, -- FLAGS and the variables (MODEL, DATA, TENSOR_PARALLEL, …) work as in train.sh.
# Results: $OUTPUT/train.json and $OUTPUT/train.png; logs and metrics: $OUTPUT/runs-TIME.
set -euo pipefail

MEASURE="${MEASURE:-gtpo_colocated}"
COMPARE="${COMPARE:-}"                 # NAME=FLAGS of each configuration, separated by ; or newlines; ratios are to the first
STEPS="${STEPS:-3}"                    # counted steps of each run
WARMUP="${WARMUP:-1}"                  # steps before them
REPEAT="${REPEAT:-3}"                  # runs of each configuration
OUTPUT="${OUTPUT:-runs/benchmark_train}" # on a disk that all nodes share

here="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for variable in STEPS WARMUP REPEAT; do
    [[ "${!variable}" =~ ^[0-9]+$ ]] || {
        printf "benchmark_train: %s is '%s'; it must be a number.\n" "$variable" "${!variable}" >&2
        exit 2
    }
done
OUTPUT="$(realpath -m "$OUTPUT")"
program=(openrlhf_gtpo.cli.benchmark train --steps "$STEPS" --warmup "$WARMUP" --repeat "$REPEAT"
    --runs "$OUTPUT/runs-$(date +%Y%m%d-%H%M%S)" --output "$OUTPUT/train.json" --png "$OUTPUT/train.png")
while IFS= read -r configuration; do
    configuration="${configuration#"${configuration%%[![:space:]]*}"}" # without leading spaces
    [[ -z "$configuration" ]] || program+=(--compare "$configuration")
done <<<"${COMPARE//;/$'\n'}"
program+=(--)

# The launcher takes STEPS as the size of the data: made to size for a CPU run, otherwise all of it.
[[ " $* " == *" --cpu "* ]] && STEPS=$((WARMUP + STEPS)) || STEPS=''
# Source the script, so that it runs the program above with its own flags.
if [[ -f "$MEASURE" ]]; then
    # shellcheck source=/dev/null
    source "$(realpath "$MEASURE")"
fi
[[ -f "$here/presets/${MEASURE%.sh}.sh" ]] || {
    printf "benchmark_train: MEASURE is '%s'; it must be a preset or a script: %s.\n" "$MEASURE" \
        "$(cd "$here/presets" && echo *.sh | sed 's/\.sh//g')" >&2
    exit 2
}
# shellcheck source=examples/scripts/train.sh
source "$here/train.sh" "${MEASURE%.sh}" "$@"
