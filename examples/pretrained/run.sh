#!/usr/bin/env bash
# Train, evaluate and export the models of this folder: run.sh TRAIN VAL FOLDER, with CIFAR-10 in class folders or tars.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
train=$1 val=$2 out=$3
mkdir -p "$out"
python "$here/vit_s.py" "$out/vit_s.safetensors"
ls-edge train --config "$here/start.yaml" --data "$train" --init "$out/vit_s.safetensors" --out "$out/start"
ls-edge train --config "$here/shared.yaml" --data "$train" --init "$out/start" --out "$out/shared" --seed 2
ls-edge eval "$out/start" --data "$val" --limit 2000 --orders 4 --keep 9,10,11 --freedom --precision bf16 --batch-size 250
ls-edge eval "$out/start" --data "$val" --orders 1 --keep 12 --precision bf16 --batch-size 250
ls-edge eval "$out/shared" --data "$val" --orders 1 --keep 9,10,11 --precision bf16 --batch-size 250
ls-edge export "$out/shared" --out "$out/bundle" --per-block --precision int8
ls-edge verify "$out/bundle" --run "$out/shared"
ls-edge eval "$out/bundle" --data "$val" --orders 1 --keep 9 --threads 1
