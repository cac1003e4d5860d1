#!/usr/bin/env bash
# Measures real training steps of another launcher: seconds, tokens/s/GPU and share of each phase, MFU, idle time, memory.
#
#   bash examples/scripts/benchmark_train.sh                                     train_gtpo_colocated.sh as it stands
#   MEASURE=train_gtpo_split.sh bash examples/scripts/benchmark_train.sh         another launcher
#   COMPARE='bf16=; fp8=--megatron.fp8 e4m3' bash examples/scripts/benchmark_train.sh      configurations in turns
#   COMPARE='tp4=; tp8=--megatron.tensor_model_parallel_size 8' …                ratios are over the first
#   LAUNCHER=benchmark_train.sh sbatch examples/scripts/train_gtpo_slurm.sh      on a SLURM cluster
#
# [--cpu] [--submit http://127.0.0.1:8265] [--dry-run] [-- trainer flags] mean what they mean in the launcher that is
# measured, whose variables (MODEL, DATA, TENSOR_PARALLEL, …) are read from the environment too. --dry-run prints the
# command and starts nothing. Results: $OUTPUT/train.json, $OUTPUT/train.png, and logs under $OUTPUT/runs-TIME.
set -euo pipefail

MEASURE="${MEASURE:-train_gtpo_colocated.sh}" # a launcher in examples/scripts, or a path
COMPARE="${COMPARE:-}"                        # NAME=FLAGS of each configuration, with ; or a new line between two
STEPS="${STEPS:-3}"                           # counted steps of a run
WARMUP="${WARMUP:-1}"                         # steps before them
REPEAT="${REPEAT:-3}"                         # runs of each configuration
OUTPUT="${OUTPUT:-runs/benchmark_train}"      # every node of a cluster sees this folder

scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
module=openrlhf_gtpo.cli.train_ppo_ray
refuse() {
    printf 'benchmark_train: %s\n' "$*" >&2
    exit 2
}
dry_run=false passed=()
while (($# > 0)); do
    case "$1" in
        --dry-run) dry_run=true ;;
        --cpu) passed+=("$1") ;;
        --submit)
            (($# > 1)) || refuse "--submit needs the address of a Ray dashboard."
            passed+=("$1" "$2")
            shift
            ;;
        --help | -h)
            sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        *) refuse "unknown flag $1; known: --cpu --submit --dry-run, and -- before flags of the trainer." ;;
    esac
    shift
done
for name in STEPS WARMUP REPEAT; do
    [[ "${!name}" =~ ^[0-9]+$ ]] || refuse "$name=${!name} is not a number."
done
launcher="$MEASURE"
[[ "$launcher" == */* ]] || launcher="$scripts/$launcher"
if [[ ! -f "$launcher" ]]; then
    known="$(find "$scripts" -name 'train_*.sh' ! -name '*_slurm.sh' -printf '%f\n' | sort | tr '\n' ' ')"
    refuse "MEASURE=$MEASURE is no launcher; there are: ${known:-none}."
fi

# What the launcher would run. Its words are quoted for a shell, which is why one may read them.
resolved="$(STEPS=$((WARMUP + STEPS)) OUTPUT="$OUTPUT" bash "$launcher" "${passed[@]}" --dry-run -- "$@")"
words=()
eval "words=($resolved)"
before=() flags=() found=false
for word in "${words[@]}"; do
    if $found; then
        flags+=("$word")
    elif [[ "$word" == "$module" ]]; then
        found=true
    else
        before+=("$word")
    fi
done
$found || refuse "$launcher --dry-run prints no command that runs $module."

[[ "$OUTPUT" == /* ]] || OUTPUT="$PWD/$OUTPUT" # a submitted job runs elsewhere
measure=(--steps "$STEPS" --warmup "$WARMUP" --repeat "$REPEAT")
measure+=(--runs "$OUTPUT/runs-$(date +%Y%m%d-%H%M%S)" --output "$OUTPUT/train.json" --png "$OUTPUT/train.png")
while IFS= read -r configuration; do
    configuration="${configuration#"${configuration%%[![:space:]]*}"}" # without the spaces in front
    [[ -z "$configuration" ]] || measure+=(--compare "$configuration")
done <<<"${COMPARE//;/$'\n'}"
command=("${before[@]}" openrlhf_gtpo.cli.benchmark train "${measure[@]}" -- "${flags[@]}")

if $dry_run; then
    line=''
    for word in "${command[@]}"; do
        if [[ "$word" == --* && -n "$line" ]]; then
            printf '%s \\\n' "$line"
            line="   "
        fi
        printf -v quoted '%q' "$word"
        line="$line${line:+ }$quoted"
    done
    printf '%s\n' "$line"
    exit 0
fi
exec "${command[@]}"
