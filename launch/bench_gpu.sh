#!/usr/bin/env bash
# Batch, group and trajectory release on one GPU, unattended, in about five minutes. The
# last line is a JSON object; pictures and the log lie in runs/bench_gpu.
#   launch/bench_gpu.sh
# Further arguments reach the bench, such as --steps=5 or --config.open_groups=4.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p runs/bench_gpu
export COMMAND=bench CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
launch/gpu_node.sh --config=configs/bench_gpu.py --workdir=runs/bench_gpu \
  --steps=2 --plot --json "$@" 2>&1 | tee runs/bench_gpu/bench.log
