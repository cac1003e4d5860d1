# shellcheck shell=bash
# Sourced by train_gtpo_slurm.sh after it has set its variables: starts a Ray cluster on a SLURM job's nodes, trains
# on it, and ends both. Each node runs `python3 -m openrlhf_gtpo.cli.doctor` and, if that finds nothing wrong,
# `python3 -m openrlhf_gtpo.cli.ray_cluster`, which can also run by hand on hosts without SLURM (docs/slurm.md).
#
# shellcheck disable=SC2154,SC2034

container_flags=() container_words=()
# A node's shell: runs SETUP, which fails if its last command does, then the words after it.
# shellcheck disable=SC2016  # expanded on the node
node_shell='eval "${SETUP:-}"; status=$?; ((status == 0)) || { echo "SETUP ended with status $status" >&2; exit "$status"; }; exec "$@"'

# choose_container KIND:IMAGE MOUNTS   MOUNTS are folders, mounted at the same paths
choose_container() {
    local image="${1#*:}" mount
    local -a folders
    IFS=, read -ra folders <<<"$2"
    case "$1" in
        '') ;;
        pyxis:?*)
            local mounts=''
            for mount in "${folders[@]}"; do mounts="$mounts,$mount:$mount"; done
            container_flags=("--container-image=$image" "--container-mounts=${mounts:1}" "--container-workdir=$root")
            ;;
        apptainer:?*)
            container_words=(apptainer exec --nv --pwd "$root")
            for mount in "${folders[@]}"; do container_words+=(--bind "$mount"); done
            container_words+=("$image")
            ;;
        *) refuse "CONTAINER=$1 must be pyxis:IMAGE or apptainer:IMAGE, or empty for none." ;;
    esac
}

# Fills addresses with one address per name in names.
find_addresses() {
    local interface="$1" name known line
    addresses=()
    for name in "${names[@]}"; do
        if [[ -n "$interface" ]]; then
            line="$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$name" ip -4 -o addr show scope global)" ||
                refuse "srun cannot run ip on the node $name; see the line above."
            line="$(awk -v name="$interface" '$2 == name { sub("/.*", "", $4); print $4; exit }' <<<"$line")"
        else
            known="$(scontrol show node "$name" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')"
            line="$(getent ahostsv4 "$known" | awk 'NR == 1 { print $1 }' || true)"
        fi
        [[ -n "$line" ]] ||
            refuse "the node $name has no IPv4 address${interface:+ on an interface $interface}; set INTERFACE to the network between the nodes."
        addresses+=("$line")
    done
    for line in "${addresses[@]}"; do
        [[ "${addresses[0]}" != 127.* || "$line" == 127.* ]] ||
            refuse "${names[0]} resolves to ${addresses[0]}, where other nodes cannot reach it; set INTERFACE to the network between the nodes."
    done
}

# step_words NODE WORDS…   fills step with a job step that runs WORDS on one node, in the container if there is one
step_words() {
    # Steps share the node's cores, memory and GPUs, which Ray assigns.
    step=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --cpu-bind=none --input=none
        "${container_flags[@]}" "${container_words[@]}" bash -c "$node_shell" step "${@:2}")
}

# show_step NODE COMMAND
show_step() {
    step_words "$1"
    printf '%q ' "${step[@]}"
    printf '\\\n    %s\n' "$2"
}

# start LOG NODE COMMAND   starts a step in the background; its process is $!
start() {
    step_words "$2" bash -c "$3"
    "${step[@]}" >>"$1" 2>&1 9>&- & # does not inherit the job's lock
}

# Prints the command for the node names[$1].
node_command() {
    local -a checks=(python3 -m openrlhf_gtpo.cli.doctor --gpus "${SLURM_GPUS_ON_NODE:-0}" --shared "$token" --temporary "$NODE_TMP")
    local -a words=(python3 -m openrlhf_gtpo.cli.ray_cluster)
    [[ -z "${MODEL:-}" ]] || checks+=(--model "$MODEL")
    if (($1 == 0)); then
        checks+=(--port "$port")
        words+=(head --port "$port")
    else
        words+=(worker --head "${addresses[0]}:$port" --timeout "$JOIN_TIMEOUT")
    fi
    words+=(--name "${names[$1]}" --address "${addresses[$1]}" --token "$token" --logs "$logs/${names[$1]}-ray" --temporary "$NODE_TMP")
    local -a flags
    read -ra flags <<<"$RAY_FLAGS"
    printf '%q ' "${checks[@]}"
    printf '&& exec '
    printf '%q ' "${words[@]}" -- "${flags[@]}"
}

wait_command() {
    printf '%q ' python3 -m openrlhf_gtpo.cli.ray_cluster wait --dashboard "$dashboard" --token "$token" \
        --timeout "$JOIN_TIMEOUT" --nodes "${names[@]}"
}

running() { [[ -n "$1" ]] && kill -0 "$1" 2>/dev/null; }

# A sleep that a signal's trap can interrupt.
nap() {
    sleep "$1" &
    wait $! || true
}

# Waits until the process $1 ends, or until the job has to end.
attend() {
    while running "$1"; do
        ! $cancelled || return 0
        if $stopping; then
            [[ -n "$trainer" ]] || return 0
            ((SECONDS < stop_deadline)) || {
                say "the step did not end in time; the run resumes from its last checkpoint."
                return 0
            }
        fi
        find_lost
        [[ -z "$lost" ]] || return 0
        nap 1
    done
}

# lose NODE WHAT-HAPPENED
lose() {
    lost="${lost:+$lost }$1"
    say "$2"
}

# Counts nodes as lost if their Ray has ended or the doctor has found a problem.
find_lost() {
    local i log what
    lost=''
    for i in "${!pids[@]}"; do
        if ! running "${pids[i]}"; then
            log="$logs/${names[i]}.log" what="Ray on the node ${names[i]} has ended"
            ! grep -aq '^wrong ' "$log" || what="the node ${names[i]} is not fit for a run"
            lose "${names[i]}" "$what; $log says why. Its last lines:"
            grep -a '^wrong ' "$log" >&2 || tail -n 5 "$log" >&2 || true
        fi
    done
}

# Runs the cluster and the training. Sets status, and the reason: lost, stopping or cancelled.
run_on_cluster() {
    local i
    pids=() waiter='' trainer='' lost='' cancelled=false status=1 stop_deadline=0
    trap 'on_stop' USR1
    trap 'cancelled=true' TERM INT
    trap 'tear_down' EXIT
    # Written before the nodes start and read it: Ray's open ports answer only to this token.
    (umask 077 && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$token")
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"
    unset RAY_AUTH_TOKEN # Ray would prefer it

    for i in "${!names[@]}"; do
        start "$logs/${names[i]}.log" "${names[i]}" "$(node_command "$i")"
        pids+=($!)
    done
    start "$logs/wait.log" "${names[0]}" "exec $(wait_command)"
    waiter=$!
    attend "$waiter"
    if [[ -n "$lost" ]] || $stopping || $cancelled; then
        true
    elif ! wait "$waiter"; then
        # Print why the nodes did not join.
        grep -h '^ray_cluster: ' "$logs/wait.log" | sed 's/^ray_cluster: /[slurm] /' >&2 || tail -n 5 "$logs/wait.log" >&2
        say "logs: $logs"
    else
        say "${#names[@]} nodes joined in $SECONDS s; training: $logs/train.log"
        start "$logs/train.log" "${names[0]}" "exec $(printf '%q ' "${training[@]}")"
        trainer=$!
        attend "$trainer"
        if ! running "$trainer"; then
            status=0
            wait "$trainer" || status=$?
            # `ray job submit` also returns 0 if the job was stopped, or still runs when its log ends.
            ((status != 0)) || ! grep -aqE "Job '[^']+' was stopped|Status for job '" "$logs/train.log" || status=1
            ((status == 0)) || explain
        fi
    fi
    tear_down
    trap - EXIT
    ! $cancelled || status=143
}

on_stop() {
    ! $stopping || return 0
    stopping=true
    # Time until the job's limit, minus the tear-down; an hour if there is no limit.
    local end left=3600
    # sbatch passes the user's SLURM_TIME_FORMAT to the job, but date reads only the standard format.
    end="$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs "$job" --format %e 2>/dev/null || true)"
    ! end="$(date -d "${end:-no limit}" +%s 2>/dev/null)" || left=$((end - $(date +%s)))
    stop_deadline=$((SECONDS + (left > 120 ? left - 60 : left / 2)))
    say "SIGUSR1: a checkpoint after this step, then back into the queue ($left s left)."
    touch "$stop_file"
}

# Prints the trainer's reason for a failure, and checks whether a node is gone.
explain() {
    local i
    # The trainer's sentence, wherever it is on a line of `ray job submit`.
    grep -aoE 'train_ppo_ray( stopped)?: .*' "$logs/train.log" | tail -n 1 >&2 || tail -n 20 "$logs/train.log" >&2
    ! $stopping || return 0
    if grep -aqE 'train_ppo_ray stopped: on request' "$logs/train.log"; then
        status=75
        return 0
    fi
    nap 3 # Ray checks its processes once a second
    find_lost
    [[ -z "$lost" ]] || return 0
    # If a node loses power, no process here ends, and SLURM notices only minutes later.
    for i in "${!names[@]}"; do
        if ! timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="${names[i]}" --input=none true >/dev/null 2>&1; then
            lose "${names[i]}" "the node ${names[i]} does not answer any more."
        fi
    done
}

# Ends every step of the job. Safe to call twice.
tear_down() {
    local deadline=$((SECONDS + 40)) number=TERM pid left
    trap '' USR1 TERM INT
    while :; do
        left=false
        for pid in "$waiter" "$trainer" "${pids[@]}"; do ! running "$pid" || left=true; done
        $left || break
        if ((SECONDS >= deadline)); then
            [[ "$number" == TERM ]] || break
            number=KILL deadline=$((SECONDS + 10))
        fi
        squeue --noheader --steps --jobs "$job" --format %i 2>/dev/null | grep -E '\.[0-9]+$' | while read -r step_id; do
            scancel --signal="$number" "$step_id" 2>/dev/null || true
        done || true
        sleep 3
    done
    rm -f "$token"
}

# Prints finished, requeue or failed.
what_next() {
    if $cancelled; then
        say "cancelled."
        echo failed
    elif ((status == 0)); then
        echo finished
    elif $stopping; then
        echo requeue
    elif [[ -n "$lost" && -z "$trainer" ]]; then # most likely the header is wrong, so a requeue would fail too
        say "no training without all nodes: look at $lost, or at SETUP, CONTAINER and OUTPUT, which all nodes must share; then sbatch again."
        echo failed
    elif [[ -n "$lost" ]]; then
        printf '%s\n' "$lost" >>"$losses" # a line per attempt of the job
        if (($(wc -l <"$losses") <= MAX_REQUEUES)); then
            echo requeue
            return
        fi
        say "the job has lost nodes ($(paste -sd ' ' "$losses")), and MAX_REQUEUES is $MAX_REQUEUES: look at $lost, then sbatch again."
        echo failed
    elif [[ -z "$trainer" ]]; then
        say "no training; the log above says why. sbatch again once that is mended."
        echo failed
    else
        say "training ended with status $status; its log: $logs/train.log. sbatch again resumes from the last checkpoint, if there is one."
        echo failed
    fi
}

requeue() {
    if scontrol requeue "$job"; then
        say "the job is back in the queue."
        exit 0
    fi
    say "SLURM does not requeue this job (--requeue, JobRequeue); sbatch again resumes from the last checkpoint, if there is one."
    exit "$status"
}
