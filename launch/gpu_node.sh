#!/usr/bin/env bash
# Trains on the GPUs of one node. From anywhere, paths seen from the repository:
#   launch/gpu_node.sh --config=configs/quickstart.py --workdir=runs/gpu
# CUDA=12 in front selects the wheels for drivers older than 580, COMMAND=bench another
# command of the package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ -x .venv/bin/python ]] || python3 -m venv .venv
.venv/bin/pip install -q -e ".[cuda${CUDA:-13},tasks,plots,tensorboard]"

# Schedules collectives so that they run behind compute: under fsdp the weights of the
# next layer arrive while this one is computed.
flags="--xla_gpu_enable_latency_hiding_scheduler=true"
export XLA_FLAGS="$flags ${XLA_FLAGS:-}"

# The default of 0.75 leaves a quarter idle; group sums can use it. The rest is for NCCL.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"

exec .venv/bin/python -m "thundersync_jax.${COMMAND:-train}" "$@"
