#!/usr/bin/env bash
# Usage: [KNOB=VALUE ...] launch/local.sh [TRAIN_OPTION ...]
# Trains on the GPUs of this machine, or on its CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

GPUS=${GPUS:-8}  # ranks; without GPUs, processes
TP=${TP:-}       # by default CONFIG's, as PP
PP=${PP:-}
CONFIG=${CONFIG:-launch/configs/gpus.yaml}

export PATH="$PWD/.venv/bin:$PATH"
exec torchrun --standalone --nproc-per-node "$GPUS" -m cce_dist train "$CONFIG" \
    ${TP:+"--parallel.tp=$TP"} ${PP:+"--parallel.pp=$PP"} "$@"
