#!/bin/sh
# build.sh: builds $IMAGE (lockstep:0.1.0) of $VARIANT (cpu) with docker, podman or buildah, whichever is there first or
# $IMAGE_TOOL. pip's variables (PIP_INDEX_URL and so on) and BASE_IMAGE are handed on when they are set.
set -eu
cd "$(dirname "$0")/../.."
variant=${VARIANT:-cpu}
image=${IMAGE:-lockstep:0.1.0}
tool=${IMAGE_TOOL:-}
for candidate in docker podman buildah; do
    [ -n "$tool" ] || ! command -v "$candidate" >/dev/null || tool=$candidate
done
[ -n "$tool" ] || { echo "build.sh: there is no docker, podman or buildah" >&2; exit 2; }

set -- --build-arg "VARIANT=$variant"
for name in BASE_IMAGE TORCH_CPU_INDEX PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT PIP_DEFAULT_TIMEOUT; do
    if value=$(printenv "$name"); then set -- "$@" --build-arg "$name=$value"; fi
done
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
set -- "$@" --build-arg "REVISION=$revision" --build-arg "VERSION=$version"
set -- "$@" --build-arg "CREATED=$(date -u +%Y-%m-%dT%H:%M:%SZ)" -t "$image" .
# Without it buildah and podman write OCI images, which have no HEALTHCHECK.
[ "$tool" = docker ] || set -- --format docker "$@"
exec "$tool" build "$@"
