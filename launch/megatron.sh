#!/usr/bin/env bash
# Usage: launch/megatron.sh SCRIPT [MEGATRON_ARGUMENT ...]
# Runs a script of Megatron's, as pretrain_gpt.py, with the loss of cce_dist on every rank.
set -euo pipefail

NODES=${NODES:-1}
GPUS=${GPUS:-8}  # of each node
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
export MEGATRON_PATCH_GRADIENT=${MEGATRON_PATCH_GRADIENT:-filtered}
# Megatron's own advice where tensor-parallel communication is to overlap with products.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m megatron_patch "$@"
