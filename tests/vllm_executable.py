"""What `vllm` is to launch/local_vllm.sh, with a fake server behind it."""

import argparse
import os
import signal

import jax

jax.config.update("jax_platforms", "cpu")

from served_policy import PolicyServer  # noqa: E402, jax is told its platform first

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("folder")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--max-model-len", type=int, required=True)
parser.add_argument("--dtype", required=True)
parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
given = parser.parse_args()
if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
    parser.error("free memory is less than the desired memory utilization (0.92)")
server = PolicyServer(given.folder, given.max_model_len)
server.port = given.port
server.development = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
with server:
    signal.pause()
