#!/usr/bin/env bash
# Usage: launch/test-versions.sh [TRITON_RELEASE ...]
# Runs the tests that depend on Triton's release with each of these releases; without arguments with
# the last patch of each minor release that the kernels are written for.
set -euo pipefail
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS=1
[[ $# -gt 0 ]] || set -- 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0 3.9.0

./launch/setup.sh test

# Installs a package into a folder of its own, apart from the environment.
install() {
    [[ -d $1 ]] || .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-deps --target "$1" "$2"
}

failed=()
for release in "$@"; do
    folder=$PWD/.venv/triton-$release
    install "$folder" "triton==$release"
    case $release in
        # These interpreters take int() of an array, which is an error from NumPy 2.4 on.
        3.[456].*)
            install "$PWD/.venv/numpy-before-2.4" "numpy<2.4"
            folder=$folder:$PWD/.venv/numpy-before-2.4
            ;;
    esac
    echo "test-versions: triton $release" >&2
    PYTHONPATH=$folder .venv/bin/python -m pytest --numprocesses 2 \
        tests/backends/triton/kernels/test_compiles.py tests/backends/triton/kernels/test_hopper.py tests/testing/test_interpreter.py \
        tests/backends/triton/test_stats.py tests/backends/triton/test_stats_numbers.py tests/backends/triton/test_warm_up.py \
        tests/core/test_slower.py \
        || failed+=("$release")
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "test-versions: failed with triton ${failed[*]}" >&2
    exit 1
fi
