#!/usr/bin/env bash
# Runs the tests of RDMA in a VM with two soft-RoCE devices, and installs nothing: what is missing it names, and skips.
# RDMA_VM is a program that boots such a VM, runs in it the program that its arguments name (a file of this machine, or a name of the
# guest's own), and ends with its status. The guest has
#   RDMA_VM=1, RDMA_A_DEV, RDMA_A_ADDR, RDMA_B_DEV, RDMA_B_ADDR   two devices on one link, and the IP addresses of their ports
#   rdma-link down|up|cut|heal|netem ARGS                         port down; packets lost without a word; tc's netem
#   ibv_devices
set -euo pipefail
cd "$(dirname "$0")/.."
skip() { echo "SKIPPED, RDMA was not tested: $*"; exit 0; }
[[ $(uname -sm) == "Linux x86_64" ]] || skip "the VM is for Linux on x86_64"
[[ -n ${RDMA_VM:-} ]] || skip "name a program in RDMA_VM that runs another one in a VM with RDMA devices; $0 says how"
vm=$(type -P "$RDMA_VM") || skip "there is no program $RDMA_VM (RDMA_VM)"
command -v cmake >/dev/null || skip "no cmake; Debian: apt-get install cmake libclang-dev"
compgen -G "${LIBCLANG_PATH:-/nowhere}/libclang*.so*" >/dev/null || ldconfig -p | grep -q libclang ||
  compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null || skip "no libclang; Debian: apt-get install libclang-dev"
devices=$("$vm" ibv_devices 2>&1) || skip "$vm runs no program in a VM: ${devices##*$'\n'}"
(($(grep -c '[0-9a-f]\{16\}' <<<"$devices") >= 2)) || skip "the VM has no two RDMA devices: $devices"

# Emulation is slow, and all tests share the two devices.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER RDMA_VM_TIMEOUT=${RDMA_VM_TIMEOUT:-600} RUST_TEST_THREADS=1 RUST_BACKTRACE=1
CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$(realpath "$vm")
cargo test -p pinion-transfer --features verbs --lib --test suite -- verbs faults
cargo test -p pinion-gpu-agent --features verbs --lib -- plane::
