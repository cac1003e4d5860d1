#!/usr/bin/env bash
# Builds docker/Dockerfile.cpu where no image registry and no container engine is at hand: debootstrap makes the base image
# from Debian's packages, buildah does the rest. Needs root on Debian or Ubuntu, and: apt-get install buildah debootstrap
#
#   bash docker/build_cpu_without_registry.sh                 build openrlhf-gtpo:cpu; a second call reuses every layer it can
#   bash docker/build_cpu_without_registry.sh --check         then run the health check and the image's command in it
#
#   --storage DIR        where base and images are kept (default: /var/tmp/openrlhf-gtpo-images); about 12 GB
#   --tag NAME           name of the image (default: openrlhf-gtpo:cpu)
#   --debian URL         Debian mirror of the base (default: http://deb.debian.org/debian)
#   --pip-config FILE    a pip.conf for the build alone: a mirror, a proxy, a certificate
#   --volume SRC:DST     a folder or file that the build may read, such as wheels or certificates; repeatable
#
# The image can then be given to a container engine:
#   buildah --root DIR/root --runroot DIR/run push openrlhf-gtpo:cpu docker-archive:cpu.tar
set -euo pipefail

project="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
storage=/var/tmp/openrlhf-gtpo-images tag=openrlhf-gtpo:cpu debian=http://deb.debian.org/debian pip_config='' check=false
volumes=()

say() { printf '[image] %s\n' "$*" >&2; }
refuse() {
    printf 'build_cpu_without_registry: %s\n' "$*" >&2
    exit 2
}
while (($# > 0)); do
    case "$1" in
        --check) check=true ;;
        --storage | --tag | --debian | --pip-config | --volume)
            (($# > 1)) || refuse "$1 needs a value."
            case "$1" in
                --storage) storage="$2" ;;
                --tag) tag="$2" ;;
                --debian) debian="$2" ;;
                --pip-config) pip_config="$2" ;;
                --volume) volumes+=(--volume "$2:ro") ;;
            esac
            shift
            ;;
        -h | --help)
            sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) refuse "unknown argument $1; known: --check --storage --tag --debian --pip-config --volume." ;;
    esac
    shift
done
[[ -z "$pip_config" || -f "$pip_config" ]] || refuse "--pip-config $pip_config is not a file."
for volume in "${volumes[@]}"; do
    [[ "$volume" == --volume || -e "${volume%%:*}" ]] || refuse "--volume ${volume%:ro}: ${volume%%:*} does not exist."
done
for program in buildah debootstrap; do
    command -v "$program" >/dev/null || refuse "$program was not found; install it (Debian: apt-get install $program)."
done
((EUID == 0)) || refuse "debootstrap makes device files and a user's own root may not: start this as root."

mkdir -p "$storage"
driver=vfs # copies the whole image for every layer
if grep -qw overlay /proc/filesystems; then
    driver=overlay
fi
engine() { buildah --root "$storage/root" --runroot "$storage/run" --storage-driver "$driver" "$@"; }
container=''
cleanup() { [[ -z "$container" ]] || engine rm "$container" >/dev/null; }
trap cleanup EXIT

base=localhost/debian-bookworm
if ! engine inspect --type image "$base" >/dev/null 2>&1; then
    say "making $base from $debian"
    container="$(engine from scratch)"
    root="$(engine mount "$container")"
    debootstrap --variant=minbase bookworm "$root" "$debian" >"$storage/debootstrap.log" 2>&1 || {
        tail -n 3 "$storage/debootstrap.log" >&2
        say "debootstrap failed; all of its output: $storage/debootstrap.log"
        exit 1
    }
    # As the official image has it: security updates too, and no packages kept.
    printf 'deb %s bookworm main\ndeb %s bookworm-updates main\ndeb %s bookworm-security main\n' \
        "$debian" "$debian" "$debian-security" >"$root/etc/apt/sources.list"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    engine umount "$container" >/dev/null
    engine commit --quiet --rm "$container" "$base" >/dev/null
    container=''
fi

secrets=()
[[ -z "$pip_config" ]] || secrets=(--secret "id=pip_conf,src=$pip_config")
started=$SECONDS
# --format docker: the OCI format has no health check.
engine bud --layers --format docker --isolation chroot --build-arg "BASE_IMAGE=$base" \
    --build-arg "REVISION=$(git -C "$project" rev-parse --short HEAD 2>/dev/null || echo unknown)" \
    "${secrets[@]}" "${volumes[@]}" --file "$project/docker/Dockerfile.cpu" --tag "$tag" "$project"
say "built $tag in $((SECONDS - started)) s: $(engine images --format '{{.Size}}' "$tag")"

if $check; then
    container="$(engine from --pull-never "$tag")"
    say "health check, as $(engine run --isolation chroot "$container" -- id)"
    engine run --isolation chroot "$container" -- python3 docker/healthcheck.py
    mapfile -t command < <(engine inspect --type image --format \
        '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' "$tag")
    started=$SECONDS
    say "the image's command: ${command[*]}"
    engine run --isolation chroot "$container" -- "${command[@]}"
    say "ended in $((SECONDS - started)) s"
fi
