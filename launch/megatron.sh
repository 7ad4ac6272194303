#!/usr/bin/env bash
# Usage: [KNOB=VALUE ...] launch/megatron.sh SCRIPT [MEGATRON_ARGUMENT ...]
# Runs a script of Megatron, such as pretrain_gpt.py, with the loss of cce_dist. Start it on every
# node, alike but for NODE_RANK.
set -euo pipefail

NODES=${NODES:-1}
GPUS=${GPUS:-8}  # of each node
TP=${TP:-}       # by default Megatron's own, 1, as PP
PP=${PP:-}
HEAD=${HEAD:-${MASTER_ADDR:-localhost}}  # name or address of the node with NODE_RANK 0
PORT=${PORT:-${MASTER_PORT:-29500}}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
script=${1:?usage: launch/megatron.sh SCRIPT [MEGATRON_ARGUMENT ...]}
export MEGATRON_PATCH_GRADIENT=${MEGATRON_PATCH_GRADIENT:-filtered}
# Megatron's advice if tensor-parallel communication is to overlap with products.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE_RANK" \
    --master-addr "$HEAD" --master-port "$PORT" -m megatron_patch "$script" \
    ${TP:+--tensor-model-parallel-size "$TP"} ${PP:+--pipeline-model-parallel-size "$PP"} "${@:2}"
