#!/usr/bin/env bash
# Measures what needs a Hopper GPU, in under ten minutes and without a network: correctness first, then the LM head,
# layers in BF16 and FP8, a whole train step, and the weight sync.
#
#   bash benchmarks/gpu/run_all.sh [OUT]        results as JSON under OUT (default: benchmarks/results/gpu)
#   bash benchmarks/gpu/run_all.sh --dry-run    print the commands
#   bash benchmarks/gpu/run_all.sh --tiny       tiny shapes, a few minutes on a host without a GPU, to test the scripts
#
# Needs torch with CUDA, Triton, transformers, pytest, hypothesis, xxhash, megatron-core and Transformer Engine, but not
# OpenRLHF, Ray, vLLM or DeepSpeed. $PYTHON is the Python to use (default: python3). Every part has a time limit, and the
# next part runs even if one fails. On a GPU with less than 100 GiB, such as the H100, measurements use smaller sizes.
# Exit status: 0, 1 if correctness failed, 3 if only measurements did, 2 for a mistake in the command line.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
out='' dry_run=false tiny=false
refuse() {
    printf 'run_all: %s\n' "$*" >&2
    exit 2
}
while (($# > 0)); do
    case "$1" in
        --dry-run) dry_run=true ;;
        --tiny) tiny=true ;;
        -h | --help)
            sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        -*) refuse "unknown flag $1; known: --dry-run --tiny." ;;
        *)
            [[ -z "$out" ]] || refuse "more than one folder: $out and $1."
            out="$1"
            ;;
    esac
    shift
done
out=${out:-benchmarks/results/gpu}
benchmark=("$python" -m openrlhf_gtpo.cli.benchmark)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

memory=141 # GiB of the GPU; --dry-run shows the commands of an H200
if ! $dry_run; then
    if ! $tiny; then
        memory="$("$python" -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory >> 30)' 2>/dev/null)" ||
            refuse "no CUDA device is visible to $python; --tiny runs without one."
    fi
    mkdir -p "$out"
    : >"$out/parts.jsonl"
fi

failed=() # names of parts
# part NAME SECONDS COMMAND...: runs one part of the suite; its output also goes to OUT/NAME.log
part() {
    local name="$1" limit="$2" started=$SECONDS status=0
    shift 2
    if $dry_run; then
        printf '%s\n' "timeout $limit $*"
        return
    fi
    printf '\n== %s (at most %s s)\n' "$name" "$limit"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log" || status=${PIPESTATUS[0]}
    printf '{"part": "%s", "exit_status": %d, "seconds": %d, "command": "%s"}\n' \
        "$name" "$status" "$((SECONDS - started))" "$*" >>"$out/parts.jsonl"
    ((status == 0)) && return
    failed+=("$name")
    printf '== %s failed: %s\n' "$name" "$( ((status == 124)) && echo "it took more than $limit s" || echo "exit status $status")"
}

if $tiny; then
    lm_head=(--shape 64x64x512 --repeat 2)
    layers=(--shape tiny --tokens 128 --sequence-length 64 --micro-batches 2 --repeat 2 --matrix 256)
    train_step=(--shape tiny --prompts 2 --samples 4 --prompt-tokens 8 --response-tokens 64 --max-tokens 256 --warmup 1 --repeat 2 --no-deepspeed)
    weight_sync=(--shape 2x128x256x512 --bucket-mb 1 --repeat 2)
else
    lm_head=(--shape 8192x3584x152064 8192x5120x152064 --repeat 41)
    layers=(--shape 7b 32b)
    train_step=(--shape 3b)
    weight_sync=(--shape 36x2048x11008x151936 --bucket-mb 64 256 1024)
    if ((memory < 100)); then
        # 18 bytes a parameter: the four precisions of `layers` are loaded at once, 65 GiB at 2 layers of 32b's widths;
        # `train-step` holds 52 GiB and, at its 8192 tokens of a micro-batch, 26 GiB of activations.
        layers+=(--layers 1)
        train_step+=(--max-tokens 4096)
    fi
fi

mapfile -t gpu_tests < <(printf '%s\n' tests/*/test_*_gpu.py)
# The project's pytest options need plugins that this host may lack.
part correctness 115 "$python" -m pytest -o addopts=--import-mode=importlib -ra -m gpu "${gpu_tests[@]}"
part lm_head 65 "${benchmark[@]}" lm-head "${lm_head[@]}" --output "$out/lm_head.json"
part layers 140 "${benchmark[@]}" layers "${layers[@]}" --output "$out/layers.json"
part train_step 240 "${benchmark[@]}" train-step "${train_step[@]}" --output "$out/train_step.json"
part weight_sync 30 "${benchmark[@]}" weight-sync --receiver process --transport colocated "${weight_sync[@]}" --output "$out/weight_sync.json"
$dry_run && exit 0

printf '\n== summary: %s, %d s\n' "$out" "$SECONDS"
cat "$out/parts.jsonl"
tail -n 1 "$out/correctness.log"
((${#failed[@]} == 0)) && exit 0
printf '== failed: %s\n' "${failed[*]}"
[[ " ${failed[*]} " != *" correctness "* ]] || exit 1
exit 3
