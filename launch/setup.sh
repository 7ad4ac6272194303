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
# compileall uses all cores, pip only one. Nobody imports packages' own tests, and of the models of
# transformers, a fifth of all lines, hardly any. Files that it cannot compile are templates.
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }
# The pip of older Pythons takes thrice as long to choose among the releases of so many packages.
install --upgrade pip
# torch's CUDA wheel requires a release of Triton. Its CPU wheel requires none: take the pinned one.
grep -v '^triton==' constraints-test.txt > .venv/constraints.txt
install --constraint .venv/constraints.txt --editable ".[$extra]"
brings_triton='import importlib.metadata as m; exit(not any(x.startswith("triton") for x in m.requires("torch")))'
if [[ $extra == test ]] && ! .venv/bin/python -c "$brings_triton"; then
    install --constraint constraints-test.txt --no-deps triton
fi
.venv/bin/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' .venv/lib || true
echo "$inputs" > "$stamp"
