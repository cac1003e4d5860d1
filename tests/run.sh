#!/usr/bin/env bash
# Every check of this project: the environment, the linters, then pytest.
#
#   bash tests/run.sh                          everything
#   bash tests/run.sh --quick                  no engine, no ranks: one to two minutes; and the lines of each room
#   bash tests/run.sh --lines >tests/lines.txt what a release counts: these lines, which later ones stand beside
#   bash tests/run.sh -k gtpo tests/algorithms arguments go to pytest; -n 0 runs its tests in one process, as --pdb wants
#
# All linters run before any failure stops the run, and pytest's summary is the last line.
set -euo pipefail

quick=()
if [[ "${1:-}" == --quick ]]; then
    quick=(-m "not slow and not e2e")
    shift
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Files of the project that match the patterns: tracked, or new and not ignored; a source archive has no git.
project_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files -co --exclude-standard --deduplicate -- "$@" | while IFS= read -r file; do
            [[ -L "$file" || ! -f "$file" ]] || printf '%s\n' "$file" # no links, and nothing deleted but not yet committed so
        done
    else
        local pattern
        for pattern in "$@"; do
            find . -path ./.venv -prune -o -type f -path "./$pattern" -print
        done
    fi
}

# Lines of Python by room: its name, the product's, the tests'.
count_lines() {
    project_files 'openrlhf_gtpo/*.py' 'tests/*.py' | sed 's#^\./##' | xargs wc -l | awk '
        $2 != "total" { depth = split($2, at, "/"); room = depth > 2 ? at[2] : "(none)"; rooms[room]; sum[room, at[1]] += $1
                        rooms["total"]; sum["total", at[1]] += $1 }
        END { for (room in rooms) print room, sum[room, "openrlhf_gtpo"] + 0, sum[room, "tests"] + 0 }' | LC_ALL=C sort
}

if [[ "${1:-}" == --lines ]]; then
    count_lines
    exit
fi
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh

mapfile -t shell_files < <(project_files '*.sh' '.ci/run')
mapfile -t dockerfiles < <(project_files 'docker/Dockerfile*' 'docker/*.Dockerfile')

checks="$(mktemp -d)"
lint() { # in the background: what it says is shown in turn
    local name="$1"
    shift
    "$@" >"$checks/$name" 2>&1 || touch "$checks/$name.failed"
}

lint mypy mypy --no-error-summary --ignore-missing-imports openrlhf_gtpo benchmarks/suite &
lint black black --check --quiet --diff . &
lint isort isort --check-only --quiet --diff . &
lint ruff ruff check --quiet . &
lint shellcheck shellcheck -x "${shell_files[@]}" &
linters=(black isort ruff mypy shellcheck)
if ((${#dockerfiles[@]} > 0)); then
    lint hadolint hadolint "${dockerfiles[@]}" &
    linters+=(hadolint)
fi
wait

failed=()
for name in "${linters[@]}"; do
    printf '== %s\n' "$name"
    cat "$checks/$name"
    [[ ! -e "$checks/$name.failed" ]] || failed+=("$name")
done
rm -rf "$checks"
if ((${#failed[@]} > 0)); then
    printf '== failed before any test: %s\n' "${failed[*]}" >&2
    exit 1
fi

if ((${#quick[@]} > 0)); then
    printf '== lines of product and tests, and how many more than at the last release\n'
    LC_ALL=C join -a 1 -e 0 -o 0,1.2,2.2,1.3,2.3 <(count_lines) tests/lines.txt |
        awk '{ printf "%-16s %6d %+6d   %6d %+6d\n", $1, $2, $2 - $3, $4, $4 - $5 }'
fi
printf '== pytest\n'
# Three workers on two cores, as whole runs often wait (tests/conftest.py). Up to 17 GB of memory.
exec python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=20 "${quick[@]}" "$@"
