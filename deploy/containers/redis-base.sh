#!/bin/bash
# Makes a stand-in for the official Redis image from this machine's redis-server and redis-cli, without any registry.
# Run python-base.sh first: it gives the shell and the libraries.
#
#   deploy/containers/redis-base.sh [TAG [BASE]]
set -euo pipefail
tag=${1:-localhost/redis:7-alpine}
base=${2:-localhost/python:3.11-slim-bookworm}
here=$(cd "$(dirname "$0")" && pwd)
export CONTAINERS_CONF=${CONTAINERS_CONF:-$here/containers.conf} BUILDAH_FORMAT=docker
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/root"
for program in "$(command -v redis-server)" "$(command -v redis-cli)"; do
  for file in "$program" $(ldd "$program" | grep -o '/[^ ]*'); do
    install -D "$(readlink -f "$file")" "$work/root$file"
  done
done
tar -C "$work/root" -cf "$work/root.tar" .
cat >"$work/Dockerfile" <<EOF
FROM $base
LABEL isthmus.stand-in=$(sha256sum <"$0" | cut -c1-12)
ADD root.tar /
VOLUME /data
WORKDIR /data
CMD ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no"]
EOF
podman build --quiet --network host --tag "$tag" "$work"
