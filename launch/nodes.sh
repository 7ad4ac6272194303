#!/usr/bin/env bash
# Usage: HEAD=HOST NODE_RANK=N [KNOB=VALUE ...] launch/nodes.sh [TRAIN_OPTION ...]
# Trains on several nodes, with torchrun on each. Start it on every node, alike but for NODE_RANK.
set -euo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-2}  # MIN:MAX is elastic: starts with MIN nodes, and goes on without lost nodes
GPUS=${GPUS:-8}    # of each node; without GPUs, processes
TP=${TP:-}         # by default CONFIG's, as PP
PP=${PP:-}
CONFIG=${CONFIG:-launch/configs/gpus.yaml}
HEAD=${HEAD:?name or address of the node with NODE_RANK 0}
PORT=${PORT:-29500}  # of HEAD, where the nodes meet
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
: "${NODE_RANK:?0 on HEAD, 1, 2, ... on the others}"
ADDRESS=${ADDRESS:-}         # address at which other nodes reach this one; by default its name
RESTARTS=${RESTARTS:-0}      # restarts of all ranks after one has failed; give --resume, too
TIME_LIMIT=${TIME_LIMIT:-0}  # such as 90m, 12h, 2d: then the ranks save and stop; 0: no limit

export PATH="$PWD/.venv/bin:$PATH"
# Without this a node that comes back would wait for ever (torch 2.13): docs/guide/ranks.md
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# is_host: in a container or namespace torchrun would guess wrong from names. read_timeout: HEAD, as
# any other node, may come ten minutes late.
exec timeout --foreground --kill-after 60 "$TIME_LIMIT" \
    torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --local-addr "$ADDRESS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id cce-dist \
    --rdzv-conf "is_host=$((NODE_RANK == 0)),read_timeout=600" --max-restarts "$RESTARTS" \
    -m cce_dist train "$CONFIG" ${TP:+"--parallel.tp=$TP"} ${PP:+"--parallel.pp=$PP"} "$@"
