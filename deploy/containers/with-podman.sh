#!/bin/bash
# Runs a command with a working DOCKER_HOST on a machine without a Docker engine: podman's Docker API, health checks
# included. Ends what it started when the command ends.
#
#   deploy/containers/with-podman.sh docker-compose -f deploy/docker-compose.yml up --no-build
#
# Needs podman buildah runc netavark aardvark-dns iptables, and docker-compose for the example.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export CONTAINERS_CONF=${CONTAINERS_CONF:-$here/containers.conf}
export BUILDAH_FORMAT=docker # the OCI format has no health checks
export DOCKER_BUILDKIT=0

work=$(mktemp -d)
started=()
finish() {
  for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT

podman system service --time 0 "unix://$work/podman.sock" >"$work/service.log" 2>&1 &
started+=($!)
export DOCKER_HOST=unix://$work/podman.sock
for _ in $(seq 100); do
  if podman --remote --url "$DOCKER_HOST" version >/dev/null 2>&1; then break; fi
  sleep 0.1
done
podman --remote --url "$DOCKER_HOST" version >/dev/null || { cat "$work/service.log" >&2; exit 1; }

# podman leaves health checks to systemd timers; here a loop runs them.
check_health() {
  local containers container
  while sleep 1; do
    containers=$(podman ps --quiet --filter status=running 2>/dev/null) || continue
    for container in $containers; do podman healthcheck run "$container" >/dev/null 2>&1 || true; done
  done
}
check_health &
started+=($!)

# In the background, so that a signal reaches the command, which cleans up after itself, before this script ends.
"$@" &
command=$!
trap 'kill -TERM "$command" 2>/dev/null || true' INT TERM
status=0
wait "$command" || status=$?
while kill -0 "$command" 2>/dev/null; do wait "$command" || status=$?; done
exit "$status"
