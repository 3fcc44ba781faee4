#!/bin/bash
# Makes a stand-in for the image python:3.11-slim-bookworm from the Debian packages installed on this machine (Debian 12
# only), without any registry. It proves our Dockerfile, not the official image.
#
#   deploy/containers/python-base.sh [TAG]
#
# Needs podman python3.11 python3.11-venv python3-pip ca-certificates netbase tzdata gcc libpython3.11-dev.
set -euo pipefail
tag=${1:-localhost/python:3.11-slim-bookworm}
here=$(cd "$(dirname "$0")" && pwd)
export CONTAINERS_CONF=${CONTAINERS_CONF:-$here/containers.conf}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

# The files of all essential packages, of Python, and of what these depend on.
wanted=$(dpkg-query -W -f '${Package} ${Essential}\n' | awk '$2 == "yes" {print $1}')
wanted="$wanted apt ca-certificates netbase passwd tzdata python3.11 python3.11-venv python3-pip" # as in the official image
# The official image has Python's headers, too; and no compiler, which cannot be fetched while this one is used.
wanted="$wanted gcc libpython3.11-dev"
# shellcheck disable=SC2086
packages=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks \
  --no-replaces --no-enhances $wanted 2>/dev/null | grep -E '^[a-z0-9]' | sed 's/:.*//' | sort -u |
  grep -vE '^(build-essential|g\+\+|python3-dev|python3.11-dev|perl|perl-modules.*)$')
for package in $packages; do dpkg -L "$package" 2>/dev/null || true; done |
  grep -vE '^/usr/share/(doc|man|locale|info)/|^/\.$|EXTERNALLY-MANAGED' | sort -u |
  while read -r file; do
    if [ -L "$file" ] || [ -f "$file" ]; then printf '%s\n' "${file#/}"; fi
  done >"$work/files"
printf '%s\n' etc/ld.so.cache etc/ld.so.conf etc/nsswitch.conf etc/debian_version >>"$work/files"

mkdir -p "$root"/usr/{bin,sbin,lib,lib64,local/bin}
for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done # before any file goes through them
sort -u "$work/files" | tar -C / --ignore-failed-read -c -T - etc/ssl/certs etc/alternatives etc/ld.so.conf.d 2>/dev/null |
  tar -C "$root" -x --keep-directory-symlink
mkdir -p "$root"/{proc,sys,dev,tmp,run,root,home,srv,var/{tmp,cache,log,lib}}
chmod 1777 "$root/tmp" "$root/var/tmp"

# Fresh accounts, not this machine's.
echo 'root:x:0:0:root:/root:/bin/bash' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
install -m 0600 /dev/null "$root/etc/shadow"
install -m 0600 /dev/null "$root/etc/gshadow"

# The official image has its Python here.
for name in python python3 python3.11; do ln -s /usr/bin/python3.11 "$root/usr/local/bin/$name"; done
ln -s /usr/bin/pip3 "$root/usr/local/bin/pip"
ln -sf python3.11 "$root/usr/bin/python3"

made_by=$(sha256sum <"$0" | cut -c1-12)
tar -C "$root" -c . | podman import --quiet --change 'CMD ["python3"]' --change "LABEL isthmus.stand-in=$made_by" \
  --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' - "$tag"
