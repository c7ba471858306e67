#!/usr/bin/env bash
# Trains on the chips of one TPU VM. From anywhere, paths seen from the repository:
#   launch/tpu_vm.sh --config=configs/quickstart.py --workdir=runs/tpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ -x .venv/bin/python ]] || python3 -m venv .venv
.venv/bin/pip install -q -e ".[tpu,tasks,plots,tensorboard]"

# Splits collectives into steps that are fused with matrix products, gathers included:
# under fsdp the weights of the next layer arrive while this one is computed.
flags="--xla_tpu_enable_async_collective_fusion=true"
flags+=" --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
# Lets a fused collective go on over several products instead of the nearest one.
flags+=" --xla_tpu_enable_async_collective_fusion_multiple_steps=true"
# Runs collectives beside the tensor core's work rather than between two pieces of it.
flags+=" --xla_tpu_overlap_compute_collective_tc=true"
export LIBTPU_INIT_ARGS="$flags ${LIBTPU_INIT_ARGS:-}"

exec .venv/bin/python -m thundersync_jax.train "$@"
