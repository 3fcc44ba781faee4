#!/bin/bash
# The whole product in containers: builds both images, brings docker-compose.yml up with random secrets, waits until its
# run has ended, checks that all sites hold the same bits, and takes down everything that it started.
#
#   make e2e        or        bash deploy/e2e.sh
#
# Uses the Docker engine where there is one. Elsewhere it uses podman, with stand-ins for the official base images made
# from this machine's Debian packages (deploy/containers/); as root on Debian it installs what that needs.
#
#   E2E_TIMEOUT    seconds that the run may take, 600 if not set
#   TORCH_SPEC, PIP_EXTRA    which torch, see Dockerfile
set -euo pipefail
cd "$(dirname "$0")/.."
containers=deploy/containers
limit=${E2E_TIMEOUT:-600}

say() { printf '\n== %s\n' "$*"; }
die() { printf 'e2e: %s\n' "$*" >&2; exit 1; }

# --- an engine --------------------------------------------------------------------------------------------------------

install_missing() {
  local package missing=()
  for package in podman buildah runc netavark aardvark-dns iptables docker-compose redis-server python3.11 \
    python3.11-venv python3-pip ca-certificates netbase tzdata gcc libpython3.11-dev; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  if [ "$(id -u)" != 0 ]; then die "no Docker engine, and not root to install: ${missing[*]}"; fi
  say "installing ${missing[*]}"
  apt-get update -qq
  # Only the programs are wanted: RUNLEVEL=1 keeps services from starting with their packages (not under systemd).
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
}

if [ -z "${E2E_ENGINE:-}" ]; then
  if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    export E2E_ENGINE=docker
  else
    command -v dpkg-query >/dev/null || die "neither a Docker engine nor Debian, on which podman could stand in for it"
    install_missing
    export E2E_ENGINE=podman
    exec "$containers/with-podman.sh" bash deploy/e2e.sh
  fi
fi
engine=$E2E_ENGINE

if [ "$engine" = docker ] && docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
else
  compose=(docker-compose)
  command -v docker-compose >/dev/null || die "docker-compose is not installed"
fi

# --- secrets, a port and a project of our own -------------------------------------------------------------------------

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
ISTHMUS_ADMIN_TOKEN=$(random)
ISTHMUS_JOIN_TOKEN=$(random)
ISTHMUS_OBSERVER_TOKEN=$(random)
ISTHMUS_REDIS_PASSWORD=$(random)
ISTHMUS_PUBLISHED_PORT=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
export ISTHMUS_ADMIN_TOKEN ISTHMUS_JOIN_TOKEN ISTHMUS_OBSERVER_TOKEN ISTHMUS_REDIS_PASSWORD ISTHMUS_PUBLISHED_PORT
export COMPOSE_PROJECT_NAME=isthmus-e2e-$$
compose+=(-f deploy/docker-compose.yml)
work=$(mktemp -d)
passed=no

finish() {
  if [ "$passed" != yes ]; then
    say "FAILED; the last lines of every service"
    "${compose[@]}" ps || true
    "${compose[@]}" logs --no-color --tail 60 || true
  fi
  say "taking down"
  "${compose[@]}" down --volumes --timeout 10 >"$work/down.log" 2>&1 || cat "$work/down.log"
  rm -rf "$work"
}

# --- images -----------------------------------------------------------------------------------------------------------

# stand_in IMAGE SCRIPT: the image that the script makes, anew if it was made by another version of it.
stand_in() {
  local made_by
  made_by=$(podman image inspect --format '{{index .Labels "isthmus.stand-in"}}' "$1" 2>/dev/null || true)
  [ "$made_by" = "$(sha256sum <"$2" | cut -c1-12)" ] || "$2" "$1"
}

build() {
  if [ "$engine" = docker ]; then
    "${compose[@]}" build
    return
  fi
  stand_in localhost/python:3.11-slim-bookworm "$containers/python-base.sh"
  stand_in localhost/redis:7-alpine "$containers/redis-base.sh"
  local target volumes
  python3 "$containers/pip_volumes.py" "$work" >"$work/volumes"
  mapfile -t volumes <"$work/volumes"
  for target in coordinator site; do
    podman build --quiet --network host "${volumes[@]}" --build-arg TORCH_SPEC="${TORCH_SPEC:-}" \
      --build-arg PIP_EXTRA="${PIP_EXTRA:-}" -f deploy/Dockerfile --target "$target" -t "isthmus-$target:local" .
  done
}

check_images() {
  in_image() { "$engine" run --rm --network none --no-healthcheck --entrypoint python "$@"; }
  local image
  for image in isthmus-coordinator:local isthmus-site:local; do
    in_image "$image" -c 'import os; assert os.getuid(), "runs as root"'
    in_image "$image" -c 'from algorithms import kernels; assert kernels.compiled, "the loops are not compiled"'
  done
  in_image isthmus-coordinator:local -c \
    'import importlib.util as u, coordinator.service; assert not u.find_spec("torch"), "torch is in the image"'
  in_image isthmus-site:local -c 'import torch, site_agent; print("torch", torch.__version__)'
}

# --- the run ----------------------------------------------------------------------------------------------------------

wait_for_start() {
  local container deadline=$((SECONDS + limit)) state restarts
  container=$("${compose[@]}" ps -q start)
  [ -n "$container" ] || die "compose made no container for the service 'start'"
  while :; do
    state=$("$engine" inspect -f '{{.State.Status}} {{.State.ExitCode}}' "$container")
    case $state in
      "exited 0") break ;;
      exited*) "$engine" logs "$container"; die "the run did not succeed: isthmus ended with exit code ${state#exited }" ;;
    esac
    restarts=$("${compose[@]}" ps -q coordinator | xargs "$engine" inspect -f '{{.RestartCount}}')
    [ "$restarts" -lt 3 ] || die "the coordinator has been restarted $restarts times"
    [ $SECONDS -lt $deadline ] || die "the run has not ended within $limit s"
    sleep 1
  done
  "$engine" logs "$container" >"$work/report.json"
}

trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "building ($engine)"
build
check_images
sync # else Redis, which waits for the disk at every write, stands still for seconds while the new images are written
say "starting"
"${compose[@]}" up -d --no-build
wait_for_start
say "checking"
python3 deploy/check_run.py "http://127.0.0.1:$ISTHMUS_PUBLISHED_PORT" "$work/report.json"
passed=yes
say "passed in $SECONDS s"
