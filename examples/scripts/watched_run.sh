# shellcheck shell=bash
# Source this: runs a training on this machine with its output in a log and its progress on the screen.

# run_watched NAME HOW OUTPUT STEPS COMMAND...: returns the command's status, or 143 or 130 if it was stopped.
#   NAME   the script's name, the prefix of its messages
#   HOW    how to continue a stopped run
#   OUTPUT the folder of train.log and metrics.jsonl
run_watched() {
    local name="$1" how="$2" output="$3" steps="$4" log="$3/train.log" status=0 logged watcher
    shift 4
    touch "$log"
    logged="$(wc -c <"$log")" # output of earlier starts
    setsid "$@" >>"$log" 2>&1 &
    trainer=$!
    stopped=0 # setsid: Ctrl-C must reach only the script; if it also ends engines and workers, the trainer fails
    trap 'stopped=143; kill "$trainer" 2>/dev/null || true' TERM HUP EXIT
    trap 'stopped=130; kill "$trainer" 2>/dev/null || true' INT
    python3 -m openrlhf_gtpo.cli.report watch "$output/metrics.jsonl" --steps "$steps" --pid "$trainer" &
    watcher=$!
    wait "$watcher" || wait "$watcher" || true # a signal ends the first one
    wait "$trainer" || status=$?
    trap - EXIT HUP INT TERM
    if ((stopped)); then
        printf '[%s] stopped; %s resumes from the last checkpoint, if there is one.\n' "$name" "$how" >&2
        exit "$stopped"
    elif ((status != 0)); then
        tail -c "+$((logged + 1))" "$log" | grep -E '^train_ppo_ray' >&2 || tail -n 20 "$log" >&2 || true
        printf '[%s] training ended with exit code %s; the whole log: %s\n' "$name" "$status" "$log" >&2
        exit "$status"
    fi
}

# print_result OUTPUT TITLE QUESTION: prints the run's table and how to use its model, and draws its curves.
print_result() {
    python3 -m openrlhf_gtpo.cli.report run "$1" --title "$2" --model "$1/model" --question "$3"
}
