#!/usr/bin/env bash
# Usage: [KNOB=VALUE ...] launch/mpi.sh [TRAIN_OPTION ...]
# Trains on ranks that mpirun of Open MPI, MPICH or Intel MPI starts. HOSTS is not needed within an
# allocation of a scheduler.
set -euo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-1}
GPUS=${GPUS:-8}    # of each node; without GPUs, processes
TP=${TP:-}         # by default CONFIG's, as PP
PP=${PP:-}
CONFIG=${CONFIG:-launch/configs/gpus.yaml}
HOSTS=${HOSTS:-}   # such as a:8,b:8; the first is HEAD

export PATH="$PWD/.venv/bin:$PATH"
# Open MPI, 4 and 5, would bind each rank to one core.
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
# mpi4py's runner ends all ranks when one raises; otherwise they would wait for it for ever.
exec mpirun ${HOSTS:+-host "$HOSTS"} -n "$((NODES * GPUS))" \
    python -m mpi4py -m cce_dist train "$CONFIG" \
    ${TP:+"--parallel.tp=$TP"} ${PP:+"--parallel.pp=$PP"} "$@"
