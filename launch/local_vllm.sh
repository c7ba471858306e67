#!/usr/bin/env bash
# vLLM servers and a trainer that samples from them, on one machine.
#
#   launch/local_vllm.sh CONFIG WORKDIR [FLAG...]
#
# FLAGs go to the trainer. What is read from the environment:
#   SERVERS   how many servers (1)           PYTHON   the trainer's (python)
#   PORT      of the first server (8000)     VLLM     the servers' executable (vllm)
#   DTYPE     float32 or bfloat16 (float32)  HEALTHY_SECS  a server's start-up (600)
#   SERVER_GPUS   one per server, such as "0 1"; empty: no GPUs
#   COMMAND   what runs beside the servers, of thundersync_jax (train)
#   LEARNER_GPUS  such as "2,3"; empty: as they are
#   SERVER_FLAGS  further flags of every server, such as "--enforce-eager"
#   VLLM_CPU_KVCACHE_SPACE  GiB of each CPU server's cache; empty: all slots at full
#                 length, or a quarter of the machine's memory where that is less
# Without SERVER_GPUS the servers are taken to run on CPU.
# The servers end with the trainer, however that ends. Their logs are in WORKDIR.
set -euo pipefail
if (($# < 2)); then
  echo "usage: launch/local_vllm.sh CONFIG WORKDIR [FLAG...]" >&2
  exit 2
fi
config=$1 workdir=$2
shift 2
python=${PYTHON:-python} vllm=${VLLM:-vllm} port=${PORT:-8000} dtype=${DTYPE:-float32}
read -ra gpus <<<"${SERVER_GPUS:-}"
read -ra flags <<<"${SERVER_FLAGS:-}"
mkdir -p "$workdir"
weights=$(cd "$workdir" && pwd)/weights

pids=()
stop() {
  trap - EXIT
  trap '' INT TERM # a second Ctrl-C leaves nothing running either
  for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
  for _ in {1..50}; do
    alive=0
    for pid in "${pids[@]}"; do kill -0 -- "-$pid" 2>/dev/null && alive=1; done
    ((alive)) || return 0
    sleep 0.2
  done
  for pid in "${pids[@]}"; do kill -9 -- "-$pid" 2>/dev/null || true; done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Somebody else's server would be healthy before our own has started.
for ((i = 0; i < ${SERVERS:-1}; i++)); do
  if (exec 3<>"/dev/tcp/127.0.0.1/$((port + i))") 2>/dev/null; then
    echo "port $((port + i)) is in use, expected free ports from PORT=$port on for" \
      "${SERVERS:-1} servers. Set PORT to another one." >&2
    exit 1
  fi
done

tied=()
# vLLM on CPU packs a tied head when it starts and never reloads it.
if ((!${#gpus[@]})); then tied=(--untied); fi
settings=()
for flag in "$@"; do
  if [[ $flag == --config.*=* ]]; then settings+=("$flag"); fi
done
said=$("$python" -m thundersync_jax.export --config="$config" --folder="$weights" \
  --dtype="$dtype" --initial "${tied[@]}" --json "${settings[@]}" | tee /dev/stderr | tail -n 1)
read -r context cache <<<"$("$python" -c '
import json, math, os, sys
export, servers = json.loads(sys.argv[1]), int(sys.argv[2])
memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
cache = min(export["cache_bytes"], memory / 4) / servers
print(export["context_tokens"], max(1, math.ceil(cache / 2**30)))' "$said" "${SERVERS:-1}")"
# Without a size, vLLM on CPU wants 92 % of the memory and starts nowhere else.
if ((!${#gpus[@]})); then export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-$cache}; fi

set -m # servers and trainer are process groups of their own: Ctrl-C comes here alone
urls=()
for ((i = 0; i < ${SERVERS:-1}; i++)); do
  if ((${#gpus[@]})); then export CUDA_VISIBLE_DEVICES=${gpus[i]}; fi
  VLLM_SERVER_DEV_MODE=1 "$vllm" serve "$weights" --port $((port + i)) --dtype "$dtype" \
    --max-model-len "$context" --logprobs-mode processed_logprobs \
    "${flags[@]}" >"$workdir/vllm_$i.log" 2>&1 </dev/null &
  pids+=($!)
  disown # or bash reports how it ended
  urls+=("http://127.0.0.1:$((port + i))")
done

for i in "${!urls[@]}"; do
  end=$((SECONDS + ${HEALTHY_SECS:-600}))
  until "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1])' \
    "${urls[i]}/health" 2>/dev/null; do
    if ! kill -0 "${pids[i]}" 2>/dev/null || ((SECONDS > end)); then
      echo "server ${urls[i]} is not healthy; the end of $workdir/vllm_$i.log:" >&2
      tail -n 20 "$workdir/vllm_$i.log" >&2
      exit 1
    fi
    sleep 1
  done
  echo "server ${urls[i]} is healthy"
done

if [[ -n ${LEARNER_GPUS:-} ]]; then export CUDA_VISIBLE_DEVICES=$LEARNER_GPUS; fi
status=0
"$python" -m "thundersync_jax.${COMMAND:-train}" --config="$config" --workdir="$workdir" \
  --config.vllm.servers="$(IFS=,; echo "${urls[*]}")" \
  --config.vllm.weights_dir="$weights" --config.vllm.dtype="$dtype" "$@" &
trainer=$!
trap 'kill -INT $trainer 2>/dev/null' INT
trap 'kill -TERM $trainer 2>/dev/null' TERM
while kill -0 "$trainer" 2>/dev/null; do
  status=0
  wait "$trainer" 2>/dev/null || status=$?
done
if ((status == 137)); then
  echo "the trainer was killed, perhaps for want of memory; the same command goes on" \
    "from its last checkpoint" >&2
fi
exit "$status"
