#!/usr/bin/env bash
# On this machine: a conversation with a real model, whose decode worker is killed; then 40 recorded coding-agent sessions against
# simulated engines, and the same once more with pools far too small. Leaves nothing running. Needs: nats-server
# (deploy/get-nats.sh), the model (deploy/get-model.sh) and the built binary.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"
trace=tests/data/claude_code_sample40.jsonl
dir=.pinion/demo
pinion() { target/release/pinion --dir "$dir" "$@"; }
trap 'pinion down >/dev/null 2>&1 || true' EXIT
pinion down >/dev/null 2>&1 || true

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
up() { pinion up --listen "127.0.0.1:$port" --prefill 1 --decode 3 "$@"; }
sim() { up --engine sim "$@"; }

echo "=== 1. A real model on this CPU, SmolLM2-135M-Instruct: 1 prefill worker, 3 decode workers, KV in real pages"
up
deploy/conversation.py target/release/pinion "$dir" "http://127.0.0.1:$port/v1/chat/completions"
pinion down

echo
echo "=== 2. Pools that hold the sample: 4,000,000 tokens a worker; simulated engines at 20 times the calibrated speed"
sim --pool-tokens 4000000 --speed 20
echo "--- 40 sessions; think times cut to 0.2 s"
pinion replay "$trace" --max-think 0.2 --min-direct 90
echo "--- Who is there, by NATS alone"
pinion worker ls
nats=$(sed -n 's|^urls = \["nats://\(.*\)"\]|\1|p' "$dir/pinion.toml")
session=$(pinion session ls | sed -n 's/^  //p' | head -1)
echo
echo "--- Where is session $session, and why?"
pinion session explain "$session"
for subject in "pinion.local.decode.decode-0.inspect" "pinion.local.prefill.prefill-0.inspect" \
    "pinion.local.router.control-0.inspect" "pinion.local.node.control-0.workers" "pinion.local.session.$session.inspect"; do
    printf 'nats --server %s request %s "" -> ' "$nats" "$subject"
    answer=$(deploy/ask.sh "$nats" "$subject")
    printf '%s bytes: %.60s...\n' "${#answer}" "$answer"
done
pinion down

echo
echo "=== 3. The prototype's pools: 92,104 tokens a worker, prompts cut to 76,000; engines at 200 times the calibrated speed"
sim --pool-tokens 92104 --speed 200
pinion replay "$trace" --max-think 0.2 --max-input 76000
pinion down

cat <<'END'

Next:
  make test                              everything that is promised, checked
  target/release/pinion up               a cluster to play with; --help says more
  target/release/pinion events           what happens to every session, live
  target/release/pinion session explain  where a session is and why it was moved
  README.md, ARCHITECTURE.md             how it works
END
