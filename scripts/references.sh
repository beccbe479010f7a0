#!/bin/sh
# Runs the libraries that own the formats, in an environment of their own, .venv-references, and the tests that compare
# typax with them on what they made.  Says what differs from tests/references/data, and with --write puts it there.
#
# PyTorch is some hundred MB without CUDA and some GB with it.  PYTHON_OF_REFERENCES=/path/to/python (3.11 or newer) decides
# which Python it is installed for.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0 PIP_USER=0
env=.venv-references pins=tests/references/constraints.txt made=build/references

if [ "$(cat "$env/typax-stamp" 2>/dev/null)" != "$(cksum <"$pins")" ]; then
    base=${PYTHON_OF_REFERENCES:-}
    for python in python3 python3.11 python3.12 python3.13 python3.14 "$(sh scripts/bootstrap.sh --python 2>/dev/null)"; do
        [ -z "$base" ] || break
        "$python" -I -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null && base=$python
    done
    [ -n "$base" ] || { echo "typax: the references need a Python >= 3.11 with venv and pip." >&2; exit 1; }
    echo "typax: setting up $env: $("$base" --version)" >&2
    rm -rf "$env"
    "$base" -m venv "$env"
    pip="$env/bin/python -m pip install -q -c $pins"
    $pip torch
    $pip torchao bitsandbytes compressed-tensors transformers safetensors ml_dtypes numpy
    $pip --no-deps auto-round autoawq accelerate py-cpuinfo
    cksum <"$pins" >"$env/typax-stamp"
fi

rm -rf "$made"
status=0
"$env/bin/python" tests/references/produce.py "$made" tests/references/data || status=1
if [ "${1:-}" = --write ]; then
    rm -rf tests/references/data
    cp -R "$made" tests/references/data
fi
TYPAX_REFERENCES=$made JAX_PLATFORMS=cpu .venv/bin/python -m pytest tests/test_references.py || status=1
exit $status
