#!/usr/bin/env bash
# Usage: launch/test.sh [PYTEST_ARGUMENT ...]
# Everything that has to pass before a commit, from a bare clone: lint, format, types, pages, tests.
set -euo pipefail
cd "$(dirname "$0")/.."

# One thread a process: the tests start up to four ranks, and results don't depend on the machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Blocks of some MB that go back to the kernel come again with a page fault for each 4 KiB.
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-268435456}
# Tests start some fifty processes, each of which would compile this package, for 1 s, where Python
# is told to write no bytecode.
export PYTHONDONTWRITEBYTECODE=
# The pinned pyright need not ask whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

./launch/setup.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
pyright
# Without the theme's advertisement of its successor.
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
# Two at a time, which keeps two cores busy: three take longer, and hold up ranks that have seconds
# to answer. The main job's tests come last and take long: whoever is done takes some of the other's.
python -m pytest --numprocesses 2 --dist worksteal "$@"
