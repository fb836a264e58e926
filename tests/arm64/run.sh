#!/usr/bin/env bash
# The edge side in an arm64 userland, emulated: install from the wheel, doctor, and a peer that serves half of the blocks
# beside a peer of this machine; every answer is replayed in one process here. Not part of `make test`.
#
#   tests/arm64/run.sh [FOLDER]        FOLDER (default /tmp/ls-edge-arm64) keeps the userland for the next time, 0.6 GB
#
# Needs Debian's qemu-user-static, proot and debootstrap, Debian's arm64 packages (MIRROR, SUITE) and PyPI's arm64 wheels,
# and the environment of `make test` (PYTHON, by default .venv/bin/python). No root, no binfmt.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD
work=$(realpath -m "${1:-/tmp/ls-edge-arm64}")
python=${PYTHON:-$here/.venv/bin/python}
mirror=${MIRROR:-}  # empty: debootstrap's own
suite=${SUITE:-bookworm}
root=$work/root
images=${IMAGES:-60}

for tool in qemu-aarch64-static proot debootstrap dpkg-deb; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install qemu-user-static proot debootstrap"; exit 2; }
done
[ -x "$python" ] || { echo "$python is missing: run make test once, or give PYTHON=..."; exit 2; }
mkdir -p "$work"

# An arm64 userland: packages are unpacked, not configured, which Python does not need.
if [ ! -e "$work/root.done" ]; then
    echo "== userland: $suite arm64${mirror:+ of $mirror}"
    rm -rf "$root"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,python3-pip "$suite" "$root" ${mirror:+"$mirror"} \
        >"$work/debootstrap.log" 2>&1 || { tail -n 3 "$work/debootstrap.log"; exit 1; }
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    touch "$work/root.done"
fi

# ONNX Runtime reads /proc/cpuinfo, and that of an x86 machine ends it. FOLDER has the same path inside and outside,
# because proot does not translate the paths of newer system calls (faccessat2).
emulated=(
    proot -q qemu-aarch64-static -0 -r "$root" -b /dev -b /proc -b /sys
    -b "$here/tests/arm64/cpuinfo:/proc/cpuinfo" -b "$work" -w "$work"
    /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 COLUMNS=120 PYTHONWARNINGS=ignore
)
guest() { "${emulated[@]}" "$@"; }
machine=$(guest /usr/bin/python3 -c 'import platform, sys; print(platform.machine(), sys.version)')
echo "== $machine"

echo "== install from the wheel"
rm -rf "$work/wheels"
mkdir -p "$work/wheels"
"$python" -m pip wheel -q --no-deps -w "$work/wheels" "$here"
version=$(guest /usr/bin/python3 -c 'import sys; print("%d%d" % sys.version_info[:2])')
platforms=()
for glibc in 17 26 27 28 31 34 35 36; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
"$python" -m pip download -q -d "$work/wheels" --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux2014_aarch64 "${platforms[@]}" "$(ls "$work"/wheels/ls_edge-*.whl)[cpu]"
guest /usr/bin/python3 -m pip install -q --break-system-packages --no-index --find-links "$work/wheels" \
    --no-compile --no-warn-script-location --root-user-action=ignore --force-reinstall "ls-edge[cpu]"
guest ls-edge --version

echo "== doctor"
guest ls-edge doctor

echo "== a bundle, made on this machine"
if [ ! -e "$work/bundle/manifest.json" ]; then
    "$python" -m ls_edge train --data digits --out "$work/run" --epochs 1 --overwrite
    "$python" -m ls_edge export "$work/run" --out "$work/bundle" --per-block
fi

echo "== half of the blocks here, half of them there"
read -r near far < <("$python" -c '
import socket
pair = [socket.socket() for _ in range(2)]
for one in pair: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in pair))')
cat >"$work/peers.yaml" <<YAML
peers:
  - {name: here, address: "tcp://127.0.0.1:$near", blocks: "0-3", engine: onnx}
  - {name: arm64, address: "tcp://127.0.0.1:$far", blocks: "4-7", engine: onnx}
YAML
peers=() # each a process group of its own, because proot does not end with its program
trap 'for peer in "${peers[@]}"; do kill -- "-$peer" 2>/dev/null || true; done; wait 2>/dev/null || true' EXIT
setsid "$python" -m ls_edge peer --peers "$work/peers.yaml" --name here --bundle "$work/bundle" >"$work/here.log" 2>&1 &
peers+=($!)
setsid "${emulated[@]}" ls-edge peer --peers "$work/peers.yaml" --name arm64 --bundle "$work/bundle" >"$work/arm64.log" 2>&1 &
peers+=($!)
rm -f "$work/trace.jsonl"
"$python" -m ls_edge run --peers "$work/peers.yaml" --bundle "$work/bundle" --data digits --policy random --limit "$images" \
    --wait 120 --budget-ms 60000 --max-skips 0 --trace "$work/trace.jsonl" \
    || { tail -n 5 "$work/here.log" "$work/arm64.log"; exit 1; }

echo "== replayed in one process on this machine"
"$python" -m tests.arm64.replay "$work/bundle" "$work/trace.jsonl" here arm64
echo "arm64: passed"
