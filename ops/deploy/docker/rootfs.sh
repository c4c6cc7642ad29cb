#!/bin/sh
# Make an image's root file system where no registry and no container daemon can be reached: the Dockerfile's own steps under
# buildah, with chroot isolation, on a base of Debian's packages. As root, on Debian, with buildah and debootstrap installed:
#   ops/deploy/docker/rootfs.sh FOLDER cpu [--build-arg NAME=VALUE ... | --volume HOST:IMAGE:ro ...]
# FOLDER/root is then the root file system, and FOLDER/image.json what the image says of itself. To remove them:
#   buildah --root FOLDER/store --runroot FOLDER/run --storage-driver overlay rm --all
set -eu
folder=$1 target=$2
shift 2
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
repository=$(cd "$(dirname "$0")/../../.." && pwd)
buildah="buildah --root $folder/store --runroot $folder/run --storage-driver overlay"

# In place of python:3.11-slim-bookworm. That has a Python of its own in /usr/local, with headers, and a pip that nobody forbids.
if ! $buildah inspect --type image localhost/debian-python > /dev/null 2>&1; then
    container=$($buildah from scratch)
    debootstrap --variant=minbase --include=ca-certificates,python3-dev,python3-pip,python-is-python3 \
        bookworm "$($buildah mount "$container")"
    rm "$($buildah mount "$container")"/usr/lib/python3*/EXTERNALLY-MANAGED
    $buildah commit --rm "$container" localhost/debian-python
fi

# buildah reads the ignore file beside the Dockerfile only if it is told to.
$buildah build --isolation chroot --pull-never --target "$target" --tag "localhost/horizonrl-$target" \
    --file "$repository/ops/deploy/docker/Dockerfile" --ignorefile "$repository/ops/deploy/docker/Dockerfile.dockerignore" \
    --build-arg BASE=localhost/debian-python "$@" "$repository"
$buildah inspect --type image "localhost/horizonrl-$target" > "$folder/image.json"
ln --symbolic --force --no-dereference "$($buildah mount "$($buildah from --pull-never "localhost/horizonrl-$target")")" "$folder/root"
du -sh "$folder/root/"
