#!/usr/bin/env bash
# Makes .venv in the project's root, with the versions of requirements/cpu.lock and this project as an editable install.
#
#   bash examples/scripts/setup_env.sh                  make it, unless it exists
#   source examples/scripts/setup_env.sh                the same, and activate it
#   bash examples/scripts/setup_env.sh --cuda           .venv-cuda instead, for GPUs; can be sourced too, with this flag first
#   bash examples/scripts/setup_env.sh --cuda --with-kernels   also Transformer Engine and DeepSpeed's FusedAdam
#   bash examples/scripts/setup_env.sh --packages-only  without the project, for an image layer independent of the code
#
# Linux x86-64, CPython 3.11 (or 3.12: see requirements/README.md), no CUDA. A second call finds the stamps below and
# returns at once. If the lock has changed, the project has moved or .venv is broken, it is rebuilt. A new environment
# is built beside the old one, which stays in use until the new one is complete. The script rejects a .venv that is a
# link or that it did not make. Errors that the user can fix end with one sentence and exit code 2. A failed download or
# build ends with exit code 1 and pip's own words.
#
# --cuda installs the wheels of requirements/cuda.lock. It needs CPython 3.12 and g++ (pycosat comes as source, and
# Triton compiles its launchers), but no GPU and no CUDA toolkit. GPUs in this host must be new enough. Packages that
# need nvcc are left out: torch's own kernels replace flash-attn and FusedAdam, and Megatron uses this project's layers.
# --with-kernels compiles two of them as docker/Dockerfile does, with the lock's own nvcc, headers and cuDNN (NVIDIA's
# nvidia-* wheels). MAX_JOBS (8) is the number of parallel compilers, and TORCH_CUDA_ARCH_LIST ("9.0", Hopper) names the
# GPU architectures. Activating the environment sets CUDA_HOME to that toolkit, for compilation at run time.

if [[ "${BASH_SOURCE[0]}" != "$0" ]]; then
    # Sourced: run in a child process, so that `set -e` and exits do not affect the caller's shell.
    if [[ "${1:-}" == --cuda ]]; then
        bash "${BASH_SOURCE[0]}" "$@" || return
        # shellcheck disable=SC1091
        source "$(dirname "${BASH_SOURCE[0]}")/../../.venv-cuda/bin/activate"
    else # any other arguments belong to the sourcing script
        bash "${BASH_SOURCE[0]}" || return
        # shellcheck disable=SC1091
        source "$(dirname "${BASH_SOURCE[0]}")/../../.venv/bin/activate"
    fi
    return
fi

set -euo pipefail

root="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
environment_stamp=.environment_stamp # written last: without it the environment is unfinished
project_stamp=.project_stamp
our_mark=.made_by_setup_env # written first: only a .venv with it, or an empty one, is replaced
torch_index="https://download.pytorch.org/whl/cpu"

say() { printf '[setup] %s\n' "$*" >&2; }

refuse() {
    say "$*"
    exit 2
}

packages_only=false cuda=false kernels=false
for word in "$@"; do
    case "$word" in
        --packages-only) packages_only=true ;;
        --cuda) cuda=true ;;
        --with-kernels) kernels=true ;;
        --help | -h)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        *) refuse "unknown arguments $*; known: --cuda --packages-only --with-kernels." ;;
    esac
done
$cuda || ! $kernels || refuse "--with-kernels compiles for GPUs; give --cuda too."

# needed_mb has room for the packages beside the old environment, and for the downloads twice, until
# they are unpacked and in pip's cache.
if $cuda; then
    venv="$root/.venv-cuda" lock="$root/requirements/cuda.lock" pythons=(12) needed_mb=24000
    size="about 4.4 GB to download, 11 GB on disk"
    ! $kernels || size+=", and seven minutes of compiling on two cores"
else
    venv="$root/.venv" lock="$root/requirements/cpu.lock" pythons=(11 12) needed_mb=7500
    size="about 1.2 GB to download, 4.6 GB on disk, a few minutes"
fi
being_made="$venv.being_made" # the new environment, until put_in_place
replaced="$venv.replaced"     # the old one, from then until its deletion
target="$venv"                # pip's target: $venv, or the environment that is being made

# An outer environment may set these. pip would then see packages outside of .venv.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

# wanted_environment PYTHON_VERSION KERNELS
wanted_environment() {
    local with=''
    ! $2 || with=' with kernels'
    printf '%s %s %s%s\n' "$(sha256sum <"$lock" | cut -c1-64)" "$root" "$1" "$with"
}

wanted_project() { cat "$root/setup.py" "$root/openrlhf_gtpo/_version.py" | sha256sum; }

# Prints the version of an environment's interpreter, or nothing if it does not start.
version_of() { "$1/bin/python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

environment_is_ready() {
    local stamp="$1/$environment_stamp" version
    [[ -f "$stamp" ]] || return 1
    version="$(version_of "$1")"
    [[ -n "$version" ]] || return 1
    [[ "$(<"$stamp")" == "$(wanted_environment "$version" true)" ]] ||
        { ! $kernels && [[ "$(<"$stamp")" == "$(wanted_environment "$version" false)" ]]; }
}

project_is_ready() {
    $packages_only || [[ -f "$1/$project_stamp" && "$(<"$1/$project_stamp")" == "$(wanted_project)" ]]
}

# Prints the path of a CPython of the first of $pythons that is installed, outside any virtual environment:
# `python3.11` may be .venv's own, which will be replaced, or a version manager's shim that does not start. The
# system's comes first if it has pip and headers: distributions build Python with profile-guided optimization, and
# pyenv by default does not. With pyenv's builds, plain Python takes 1.4 times as long and a run's imports 1.1
# times.
find_python() {
    local minor candidate
    for minor in "${pythons[@]}"; do
        for candidate in "/usr/bin/python3.$minor" "python3.$minor" python3 python; do
            "$candidate" -I -c "import sys; sys.exit(sys.version_info[:2] != (3, $minor))" >/dev/null 2>&1 || continue
            [[ "$candidate" != /usr/bin/python* ]] ||
                { "$candidate" -I -c 'import ensurepip' 2>/dev/null && has_headers "$candidate"; } || continue
            "$candidate" -I -c 'import sys; print(sys._base_executable)'
            return
        done
    done
}

has_headers() {
    "$1" -I -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())'
}

check_host() {
    [[ "$(uname -sm)" == "Linux x86_64" ]] ||
        refuse "${lock#"$root/"} is for Linux on x86-64; this is $(uname -sm)."

    local special="[][[:space:]\"'\\\$\`&;()<>|*?{}#~!^]"
    [[ ! "$root" =~ $special ]] ||
        refuse "$root has blanks or other special characters, and Ray cannot start workers from such a path: move the project."
    python="$(find_python)"
    [[ -n "$python" ]] || ! $cuda || refuse "Python 3.12 was not found on PATH, the only version that requirements/cuda.lock supports:" \
        "load or install it (module load python/3.12, uv python install 3.12, Ubuntu 24.04: apt-get install python3-venv python3-dev)."
    [[ -n "$python" ]] || refuse "neither Python 3.11 nor 3.12 was found on PATH: install one" \
        "(Debian 12: apt-get install python3 python3-venv python3-dev)."
    if $cuda; then
        local complaint
        complaint="$("$python" -I "$root/openrlhf_gtpo/platform/gpus.py" 13)" # before the download
        [[ -z "$complaint" ]] || refuse "$complaint"
    fi
    # pycosat comes as source, and torch and Triton compile at run time.
    command -v g++ >/dev/null ||
        refuse "g++ was not found, but one package and parts of torch need it: install it (Debian: apt-get install g++; a cluster: module load gcc)."
    has_headers "$python" ||
        refuse "$python has no header Python.h, which a package needs to compile: install it" \
            "(Debian: apt-get install python3-dev)."
    if $cuda; then
        # llguidance and tensorboard-data-server need this, the newest version that any of the lock's wheels needs.
        printf 'glibc 2.31\n%s\n' "$(getconf GNU_LIBC_VERSION)" | sort -V -C ||
            refuse "packages of requirements/cuda.lock need glibc 2.31 or newer, and this system has" \
                "$(getconf GNU_LIBC_VERSION): use the image, for example with Apptainer (docs/docker.md)."
    else
        "$python" -I -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
            refuse "libnuma.so.1 was not found, but vLLM's CPU build needs it: install it" \
                "(Debian: apt-get install libnuma1)."
    fi

    local free_mb
    free_mb="$(df -Pm "$root" | awk 'NR == 2 { print $4 }')"
    ((free_mb >= needed_mb)) ||
        refuse "$root has ${free_mb} MB of free disk, but the environment needs ${needed_mb} MB: free some space or move the project."
}

# Writes pip's output to pip.log and reports its progress. TOTAL is the expected number of packages.
show_progress() {
    local total="$1" count=0 line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$target/pip.log"
        case "$line" in
            Collecting\ *) ((++count % 25)) || say "$count/$total packages" ;;
            Building\ wheels*) ((total < 25)) || say "building the packages that come as source" ;;
            Installing\ collected*) ((total < 25)) || say "unpacking" ;;
        esac
    done
}

pip_flags=(--no-deps --no-build-isolation --progress-bar off)

# run_pip TOTAL SUBCOMMAND ARGUMENTS…
run_pip() { "$target/bin/python" -I -m pip "$2" "${pip_flags[@]}" "${@:3}" 2>&1 | show_progress "$1"; }

fail() {
    grep -E '^ *(ERROR|error)' "$target/pip.log" | tail -n 2 >&2 || tail -n 10 "$target/pip.log" >&2
    say "$* (all of its output: $target/pip.log); fix that and start again."
    exit 1
}

locked() { grep -E "^($1)==" "$lock"; }

# Two processes, because pip unpacks on one core. torch is fetched first, because an index may lack its CPU build, and
# unpacked after DeepSpeed, whose build behaves differently if it finds torch (its setup.py, torch_available).
install_cpu_packages() {
    local pins="$TMPDIR/pins.txt" torch install
    install="${target@Q}/bin/python -I -m pip install ${pip_flags[*]}"
    grep -Ev '^(#|torch==|setuptools==|wheel==|$)' "$lock" >"$pins"
    torch="$(locked torch)"
    if ! run_pip 1 download -d "$TMPDIR/torch" "$torch"; then
        say "pip's own sources do not have $torch; trying $torch_index"
        run_pip 1 download -d "$TMPDIR/torch" --extra-index-url "$torch_index" "$torch" || fail "pip could not fetch $torch"
    fi
    install_tools
    grep '^[a-o]' "$pins" >"$pins.first" # with deepspeed
    grep '^[^a-o]' "$pins" >"$pins.second"
    # With xargs instead of &, after which Ctrl-C would not reach pip.
    printf '%s\0' "$install -r ${pins@Q}.first && $install --no-index --find-links ${TMPDIR@Q}/torch $torch" \
        "$install -r ${pins@Q}.second" | xargs -0 -P 2 -n 1 bash -c 2>&1 |
        show_progress "$(wc -l <"$pins")" || fail "pip could not install the packages of requirements/cpu.lock"
}

# As in docker/Dockerfile, which explains each variable: wheels first, then packages that compile against their torch.
# Without kernels DeepSpeed is built with the wheels, before torch is there, and compiles nothing.
install_cuda_packages() {
    local pins="$TMPDIR/pins.txt" nvidia left_out='transformer-engine(-cu13|-torch)?=='
    ! $kernels || left_out='(transformer-engine-torch|deepspeed)=='
    grep -Ev "^(#|flash-attn==|$left_out|setuptools==|wheel==|\$)" "$lock" >"$pins"
    install_tools
    run_pip "$(wc -l <"$pins")" install -r "$pins" || fail "pip could not install the packages of requirements/cuda.lock"

    nvidia="$(echo "$target"/lib/python3*/site-packages/nvidia)"
    export CUDA_HOME="$nvidia/cu13" PATH="$target/bin:$PATH" # ninja
    # The toolkit is complete, except for names that linkers search for.
    ln -s lib "$CUDA_HOME/lib64"
    ln -s libcudart.so.13 "$CUDA_HOME/lib/libcudart.so"
    if $kernels; then
        export MAX_JOBS="${MAX_JOBS:-8}" TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}"
        NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE CPATH="$nvidia/cudnn/include:$nvidia/nccl/include" \
            compile transformer-engine-torch
        DS_ACCELERATOR=cuda DS_BUILD_FUSED_ADAM=1 compile deepspeed
    fi
    printf 'export CUDA_HOME="%s"\n' "$CUDA_HOME" >>"$target/bin/activate"
    "$target/bin/python" "$root/docker/healthcheck.py" --packages-only >&2 || {
        say "the installed packages do not fit together; see the lines above."
        exit 1
    }
}

# Without pip's cache, which might return a wheel compiled against another torch.
compile() {
    say "compiling $1 ($MAX_JOBS compilers at once; MAX_JOBS)"
    run_pip 1 install --no-cache-dir --no-binary "$1" "$(locked "$1")" || fail "pip could not compile $1"
}

# Source packages are built with the locked setuptools and wheel, not the newest ones of the day.
install_tools() {
    local -a tools
    mapfile -t tools < <(locked 'setuptools|wheel')
    run_pip 2 install "${tools[@]}" || fail "pip could not install ${tools[*]}"
}

make_environment() {
    local started=$SECONDS
    say "making $venv with $("$python" -V): $size"
    mkdir "$target"
    touch "$target/$our_mark"
    "$python" -m venv "$target" || refuse "$python could not make a virtual environment (Debian: apt-get install python3-venv)."
    export TMPDIR="$target/tmp" # for pip's downloads until they are unpacked; /tmp is small on many machines
    mkdir "$TMPDIR"
    if $cuda; then install_cuda_packages; else install_cpu_packages; fi

    rm -rf "$TMPDIR"
    unset TMPDIR
    wanted_environment "$(version_of "$target")" "$kernels" >"$target/$environment_stamp"
    say "installed the packages of ${lock#"$root/"} in $((SECONDS - started)) s"
}

make_project() {
    rm -f "$target/$project_stamp"
    # --no-index: fetches nothing, so this works without a network.
    run_pip 1 install --no-index -e "$root" || fail "pip could not install the project itself"
    wanted_project >"$target/$project_stamp"
}

# A virtual environment's path is written only in its scripts and in pyvenv.cfg, as far as anything reads it. Replacing
# it there takes a moment. Building the new environment at its final path instead would leave the user without an
# environment for minutes, and with a partial one after an interruption.
put_in_place() {
    grep -rlIZF "${being_made##*/}" "$being_made/bin" "$being_made/pyvenv.cfg" |
        xargs -0 sed -i "s/${being_made##*/}/${venv##*/}/g"
    [[ ! -d "$venv" ]] || mv -T "$venv" "$replaced"
    mv -T "$being_made" "$venv"
    rm -rf "$replaced"
}

if environment_is_ready "$venv" && project_is_ready "$venv" && [[ ! -e "$replaced" ]]; then
    exit 0
fi

if [[ -L "$venv" ]]; then
    refuse "$venv is a link to $(readlink "$venv"), which may be another checkout's environment: remove the link, and" \
        "run this again to make one here."
fi
if [[ -e "$venv" && ! -f "$venv/$our_mark" ]] && [[ ! -d "$venv" || -n "$(ls -A "$venv")" ]]; then
    refuse "$venv was not made by this script, and the environment needs that path: move it away."
fi

command -v flock >/dev/null || refuse "flock was not found: install it (Debian: apt-get install util-linux)."
if [[ -d "$venv" && ! -w "$venv" ]] || ! { exec 9>"$root/.setup_env.lock"; } 2>/dev/null; then
    refuse "$root and its .venv must be writable, but this user ($(id -un)) may not write there."
fi
if ! flock -n 9; then
    say "another setup of $venv is running; waiting for it"
    flock 9
fi

if [[ ! -e "$venv" && -d "$replaced" ]]; then # interrupted during put_in_place
    mv -T "$replaced" "$venv"
fi
rm -rf "$replaced"

if ! environment_is_ready "$venv"; then
    target="$being_made"
    if ! environment_is_ready "$target"; then # otherwise only the project or the last step is missing
        rm -rf "$target"
        check_host
        make_environment
    fi
    project_is_ready "$target" || make_project
    put_in_place
elif ! project_is_ready "$venv"; then
    make_project
fi
say "$venv is ready"
