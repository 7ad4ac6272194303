#!/usr/bin/env bash
# Usage: launch/quickstart.sh [TRAIN_OPTION ...]
# Trains a small language model on real text, its vocabulary sharded over the ranks, from a bare
# clone. Options after the config override it: see `cce-dist train --help`.
set -euo pipefail
cd "$(dirname "$0")/.."

RANKS=${RANKS:-2}
CONFIG=${CONFIG:-launch/configs/quickstart.yaml}

cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + RANKS - 1) / RANKS))}

./launch/setup.sh train
export PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node "$RANKS" -m cce_dist train "$CONFIG" "$@"
