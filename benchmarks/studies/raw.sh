#!/usr/bin/env bash
# Source this: packs and unpacks the raw files of a study's runs, kept in one archive (Python: tarfile.open).

# unpack ARCHIVE FOLDER: unpack an archive, if it exists, without replacing files
unpack() {
    mkdir -p "$2"
    [[ ! -e $1 ]] || tar --skip-old-files -xJf "$1" -C "$2"
}

# pack ARCHIVE FOLDER FILE...: make an archive of files, named relative to the folder; the same files give the same bytes
pack() {
    mkdir -p "$(dirname "$1")"
    tar --sort=name --owner=0 --group=0 --numeric-owner --mode=644 --mtime=@1 -cJf "$1.new" -C "$2" "${@:3}"
    mv "$1.new" "$1"
}
