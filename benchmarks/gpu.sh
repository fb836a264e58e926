#!/usr/bin/env bash
# Check and measure a machine with an NVIDIA GPU in about eight minutes, most important first.
#
#     benchmarks/gpu.sh prepare OUT RUN...     # on any machine: export the runs to OUT/bundles
#     benchmarks/gpu.sh measure OUT            # on the GPU: one log for each step in OUT
#     PROVIDER=cpu benchmarks/gpu.sh measure OUT    # try it without a GPU
#
# `measure` needs onnxruntime-gpu and, for the tests of CUDA, pytest; BIN is the folder of ls-edge and python.
set -u
what=$1 out=$2
shift 2
bin=${BIN:-$(dirname "$(command -v ls-edge)")}
provider=${PROVIDER:-cuda} data=${DATA:-examples/cifar10/images}
number=0
mkdir -p "$out/bundles"

step() { # NAME SECONDS COMMAND...: run a command into a log, and print how it ended
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  number=$((number + 1))
  log=$(printf '%s/%02d-%s.log' "$out" "$number" "$name")
  { echo "\$ $*"; timeout "$limit" "$@"; } > "$log" 2>&1 || code=$?
  echo "$(basename "$log"): exit code $code after $((SECONDS - began)) s"
}

run_with_a_killed_peer() { # BUNDLE: kill a peer a second after all are ready, and recompute the answers here
  "$bin/ls-edge" run --local 3 --bundle "$1" --data "$data" --limit 600 --rate 20 --audit 1 --provider cpu --json &
  local run=$! peers=
  for _ in $(seq 60); do
    sleep 1
    peers=$(pgrep -P "$run" -f ' peer ')
    [ "$(wc -w <<< "$peers")" = 3 ] && break
  done
  sleep 5
  nvidia-smi --query-compute-apps=pid,used_memory --format=csv || true
  kill -9 $(tail -1 <<< "$peers") && echo "killed one of $(echo $peers)"
  wait "$run"
}
export -f run_with_a_killed_peer
export bin data

if [ "$what" = prepare ]; then
  for run in "$@"; do
    for precision in fp32 fp16; do
      step "export-$(basename "$run")-$precision" 1800 "$bin/ls-edge" export "$run" --per-block --whole \
        --precision "$precision" --out "$out/bundles/$(basename "$run")-$precision"
    done
  done
  exit
fi

step cuda 120 "$bin/python" -m pytest -c /dev/null --noconftest -q tests/engines/cuda/test_on_a_gpu.py
for bundle in "$out"/bundles/*; do
  name=$(basename "$bundle")
  step "verify-$name" 60 "$bin/ls-edge" verify "$bundle" --engine onnx
  step "bench-$name" 60 "$bin/ls-edge" bench "$bundle" --provider "$provider" --duration 3
  # The same with tokens that are copied to the host after each block.
  step "bench-copied-$name" 60 "$bin/python" -c 'import ls_edge.engines.opening as opening
opening._workspace = lambda *_: None
from ls_edge.cli.main import main
main()' bench "$bundle" --provider "$provider" --duration 3
done
first=$(ls -d "$out"/bundles/* | head -1)
step killed-peer 120 bash -c "run_with_a_killed_peer '$first'"
step doctor 180 "$bin/ls-edge" doctor --report "$out/report.md" --bundle "$first" --data "$data"
step tensorrt 90 "$bin/ls-edge" verify "$first" --engine tensorrt
