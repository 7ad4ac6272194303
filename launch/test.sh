#!/usr/bin/env bash
# Usage: launch/test.sh [PYTEST_ARGUMENT ...]
# Runs all that has to pass before a commit, from a bare clone: lint, format, types, pages, tests.
set -euo pipefail
cd "$(dirname "$0")/.."

# One thread a process, whatever the shell has: the threads of several processes wait for one another
# on few cores, and small tests take four times as long. Results don't depend on the machine then.
export OMP_NUM_THREADS=1
# Keep blocks of some MB: a block that went back to the kernel costs a page fault for each 4 KiB.
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-268435456}
# Write bytecode: otherwise each of some fifty processes would compile this package, for 1 s.
export PYTHONDONTWRITEBYTECODE=
# The pinned pyright must not ask for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

./launch/setup.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
# Each of these takes one core, so they run beside the first tests, and have their say after the last.
# The pages are built without the theme's advertisement of its successor.
{ pyright && NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet; } > .venv/checks.txt 2>&1 &
checks=$!
# Two processes keep two cores busy; three take longer, and delay ranks that have seconds to answer.
# The training job's tests come last and take long: an idle process takes tests from the other.
tests=0
python -m pytest --numprocesses 2 --dist worksteal "$@" || tests=$?
wait $checks || { cat .venv/checks.txt >&2; exit 1; }
exit $tests
