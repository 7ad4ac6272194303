#!/usr/bin/env bash
# Usage: launch/setup.sh EXTRA
# Creates .venv if missing and installs this package with EXTRA of pyproject.toml into it, from
# the pinned versions in constraints-test.txt. Does nothing when neither file has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}  # any Python >= 3.10 with its venv module; read when .venv is created
extra=${1:?usage: launch/setup.sh EXTRA}

stamp=.venv/.installed-$extra
inputs=$(cat pyproject.toml constraints-test.txt | cksum)
if [[ -f $stamp && $(<"$stamp") == "$inputs" ]]; then
    exit
fi
[[ -x .venv/bin/pip ]] || "$PYTHON" -m venv .venv
echo "setup: installing cce-dist[$extra] and PyTorch into .venv; this can take minutes" >&2
# pip itself compiles on one core. What cannot be compiled are templates of files.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint constraints-test.txt --editable ".[$extra]"
.venv/bin/python -m compileall -qq -j 0 .venv/lib || true
echo "$inputs" > "$stamp"
