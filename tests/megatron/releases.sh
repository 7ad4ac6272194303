#!/usr/bin/env bash
# Usage: tests/megatron/releases.sh RELEASE ...
# Runs the tests of megatron_patch on other releases. RELEASE is a version of megatron-core for pip,
# such as 0.14.0, or the folder of a Megatron-LM checkout. From 0.17 on both need Python 3.12: set
# PYTHON=python3.12 for a new .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."

export OMP_NUM_THREADS=1

./launch/setup.sh test
for release in "$@"; do
    folder=$release
    if [[ ! -d $folder ]]; then
        folder=$PWD/.venv/megatron-core-$release
        [[ -d $folder ]] || .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --no-deps --target "$folder" "megatron-core==$release"
    fi
    echo "megatron $release" >&2
    PYTHONPATH=$folder .venv/bin/python -m pytest --numprocesses 2 \
        tests/megatron/test_megatron.py tests/megatron/pipeline/test_megatron_pipeline.py
done
