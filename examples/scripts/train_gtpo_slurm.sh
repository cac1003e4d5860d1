#!/usr/bin/env bash
# Trains on several nodes of a SLURM cluster: starts a Ray cluster on them and runs a train.sh preset.
#
#   sbatch examples/scripts/train_gtpo_slurm.sh                     from the project's root, after editing this header
#   LAUNCHER=grpo_s_colocated NODES=2 sbatch --nodes=2 examples/scripts/train_gtpo_slurm.sh
#   sbatch examples/scripts/train_gtpo_slurm.sh -- --actor.adam.lr 5e-7      arguments after -- go to the trainer
#   bash examples/scripts/train_gtpo_slurm.sh --dry-run             print every command, start nothing; on any host
#
# Before the job's time limit, before preemption (if the cluster signals it) and on `scancel --batch --signal=USR1 JOB`,
# the run saves a checkpoint after the step in progress, and the job goes back into the queue and continues from there.
# docs/slurm.md explains its messages.

#SBATCH --job-name=gtpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
##SBATCH --account=…
##SBATCH --partition=…
# @900: seconds before the end; must be longer than one step plus saving a checkpoint.

# What to run from the project's root: a preset of train.sh, or a script (benchmark_train.sh, the planner's). Its
# variables (MODEL, STEPS, NODES, …) come from the environment too.
LAUNCHER="${LAUNCHER:-gtpo_32b}"
LAUNCHER_FLAGS="${LAUNCHER_FLAGS:-}"           # such as --cpu
OUTPUT="${OUTPUT:-}"                           # on a disk that all nodes share; empty: runs/LAUNCHER, with ALGORITHM and SURROGATE
# Where to run: on the bare host, after these shell commands on each node …
SETUP="${SETUP:-}"                             # such as: module load cuda && source /shared/venv/bin/activate
# … or in a container: pyxis:IMAGE (srun --container-image) or apptainer:IMAGE.
CONTAINER="${CONTAINER:-}"
CONTAINER_MOUNTS="${CONTAINER_MOUNTS:-}"       # more folders, such as /shared/models,/scratch
# The network between the nodes: an interface such as ib0; empty: SLURM's address of each node.
INTERFACE="${INTERFACE:-}"
PORT="${PORT:-}"                               # first of four ports on the head; empty: derived from the job's number
RAY_FLAGS="${RAY_FLAGS:-}"                     # flags of `ray start` on every node
NODE_TMP="${NODE_TMP:-/tmp}"                   # on each node's own disk; a short path, for Unix sockets
JOIN_TIMEOUT="${JOIN_TIMEOUT:-600}"            # seconds until every node must have joined
MAX_REQUEUES="${MAX_REQUEUES:-5}"              # after lost nodes; a signal always requeues
set -euo pipefail

say() { printf '[slurm] %s\n' "$*" >&2; }
refuse() {
    say "$*"
    exit 2
}

dry_run=false
while (($# > 0)); do
    case "$1" in
        --dry-run) dry_run=true ;;
        --help | -h)
            sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        *) refuse "unknown flag $1; known: --dry-run --help, and -- before flags of the trainer." ;;
    esac
    shift
done
# SLURM runs a copy of this file in another folder.
root="${ROOT:-${SLURM_SUBMIT_DIR:-$(pwd)}}"
[[ -f "$root/examples/scripts/ray_cluster.sh" ]] ||
    refuse "$root is not the project's root; call sbatch from the root, or set ROOT to it."
cd "$root"
[[ "$LAUNCHER" != */presets/*.sh ]] || LAUNCHER="$(basename "$LAUNCHER" .sh)"
launcher=(bash "$LAUNCHER")
if [[ -f "examples/scripts/presets/$LAUNCHER.sh" ]]; then
    launcher=(bash examples/scripts/train.sh "$LAUNCHER")
    LAUNCHER="train_$LAUNCHER"
elif [[ ! -f "$LAUNCHER" ]]; then
    refuse "LAUNCHER=$LAUNCHER is neither a script nor one of: $(cd examples/scripts/presets && echo *.sh | sed 's/\.sh//g')."
fi
read -ra launcher_flags <<<"$LAUNCHER_FLAGS"
[[ " ${launcher_flags[*]} $* " != *" --ckpt.stop_file"[\ =]* ]] ||
    refuse "this script sets --ckpt.stop_file itself; to stop, touch OUTPUT/slurm/JOB-ATTEMPT/stop, or scancel --batch --signal=USR1 JOB."
for number in "JOIN_TIMEOUT=$JOIN_TIMEOUT" "MAX_REQUEUES=$MAX_REQUEUES" "PORT=${PORT:-1}"; do
    [[ "${number#*=}" =~ ^[0-9]{1,9}$ ]] || refuse "$number is not a number."
done
[[ -z "$PORT" ]] || ((10#$PORT >= 1024 && 10#$PORT <= 65532)) || refuse "PORT=$PORT must be from 1024 to 65532, the first of four."
# shellcheck source=examples/scripts/ray_cluster.sh
source examples/scripts/ray_cluster.sh
variant="${ALGORITHM:+-$ALGORITHM}${SURROGATE:+-$SURROGATE}"
[[ " $LAUNCHER_FLAGS " != *" --cpu "* ]] || variant+=-cpu # as in train.sh, but the OUTPUT exported here overrides its own
OUTPUT="$(realpath -m "${OUTPUT:-runs/$(basename "$LAUNCHER" .sh)$variant}")"
export OUTPUT
mounts="$root,$OUTPUT${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
[[ "$NODE_TMP" == /tmp ]] || mounts+=",$NODE_TMP" # a container has a /tmp
choose_container "$CONTAINER" "$mounts"

if $dry_run; then
    : "${SLURM_JOB_ID:=1}" "${SLURM_RESTART_COUNT:=0}"
    names=(HEAD WORKER) addresses=(HEAD-ADDRESS WORKER-ADDRESS)
else
    [[ -n "${SLURM_JOB_ID:-}" ]] || refuse "this is a batch script: sbatch $0, or bash $0 --dry-run to look at it."
    stopping=false
    trap 'stopping=true' USR1 # until run_on_cluster has its own: back into the queue
    unset SLURM_EXPORT_ENV # of sbatch --export=…: srun would keep from its steps what is exported below
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    [[ -z "${SLURM_GPUS:-}" ]] || # every srun would ask for all of them on its one node
        refuse "sbatch --gpus=$SLURM_GPUS deals out the GPUs of all nodes together; ask for those of each with --gpus-per-node."
    find_addresses "$INTERFACE"
fi
attempt="${SLURM_RESTART_COUNT:-0}"
# To SLURM the number of an array's last task is that of the whole array.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
port="${PORT:-$((20000 + SLURM_JOB_ID % 1200 * 10))}"
dashboard="http://127.0.0.1:$((port + 1))"
logs="$OUTPUT/slurm/$SLURM_JOB_ID-$attempt"
losses="$OUTPUT/slurm/$SLURM_JOB_ID-lost"
token="$logs/ray_token"
stop_file="$logs/stop" # one per attempt: an earlier attempt's request must not stop this one
flags=("${launcher_flags[@]}" -- --ckpt.load_enable --ckpt.stop_file "$stop_file" "$@")
training=("${launcher[@]}" --submit "$dashboard" "${flags[@]}")
export SETUP PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
[[ -z "$INTERFACE" ]] || export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"

if $dry_run; then
    for i in "${!names[@]}"; do show_step "${names[i]}" "$(node_command "$i")"; done
    show_step HEAD "$(wait_command)"
    show_step HEAD "$(printf '%q ' "${training[@]}")"
    say "and the launcher itself:"
    exec "${launcher[@]}" --dry-run "${flags[@]}"
fi

mkdir -p "$logs" || refuse "OUTPUT=$OUTPUT cannot be created; name another folder."
exec 9>"$OUTPUT/slurm/lock" # held until this job ends: another job, or another task of its array, would write the same files
waits=$((attempt > 0 ? 60 : 0)) # processes of the last attempt may still be ending
flock --timeout "$waits" --conflict-exit-code 75 9 || (($? != 75)) || refuse "another job trains in OUTPUT=$OUTPUT; give this one its own, or wait for that one."
say "job $SLURM_JOB_ID, attempt $((attempt + 1)), on ${names[*]}; logs: $logs"
run_on_cluster # sets status, and the reason: lost, stopping or cancelled
case "$(what_next)" in
    requeue) requeue ;;
    finished) say "training is over; results: $OUTPUT" ;;
esac
exit "$status"
