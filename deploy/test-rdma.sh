#!/usr/bin/env bash
# Runs the tests of RDMA in a VM with two soft-RoCE devices, and installs nothing: what is missing it names, and skips.
# RDMA_VM: a program that runs another one in such a VM and ends with its status. Default: ../shared/rdma-vm/run.
set -euo pipefail
cd "$(dirname "$0")/.."
vm=${RDMA_VM:-../shared/rdma-vm/run}
skip() { echo "SKIPPED, RDMA was not tested: $*"; exit 0; }
[[ $(uname -sm) == "Linux x86_64" ]] || skip "the VM is for Linux on x86_64"
[[ -x $vm ]] || skip "no program $vm; name one with RDMA_VM=PATH"
for tool in cmake qemu-system-x86_64 cpio; do
  command -v "$tool" >/dev/null || skip "no $tool; Debian: apt-get install cmake libclang-dev qemu-system-x86 cpio"
done
compgen -G "${LIBCLANG_PATH:-/nowhere}/libclang*.so*" >/dev/null || ldconfig -p | grep -q libclang ||
  compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null || skip "no libclang; Debian: apt-get install libclang-dev"
[[ -s ${RDMA_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rdma-vm}/kernel ]] || skip "the VM is not made yet: run $(dirname "$vm")/build once"

# Emulation is slow, and all tests share the two devices.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER RDMA_VM_TIMEOUT=${RDMA_VM_TIMEOUT:-600} RUST_TEST_THREADS=1 RUST_BACKTRACE=1
CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$(realpath "$vm")
cargo test -p pinion-transfer --features verbs --lib --test suite -- verbs faults
cargo test -p pinion-gpu-agent --features verbs --lib -- plane::
