#!/bin/sh
# Writes the matrix: every row on each supported JAX, into tests/data/matrix.json and docs/limits.md.
set -eu
cd "$(dirname "$0")/.."
for file in constraints/jax-*.txt; do
    version=${file#constraints/jax-}
    version=${version%.txt}
    sh scripts/bootstrap.sh "jax-$version"
    ".venv-jax-$version/bin/python" scripts/matrix.py --write
done
.venv/bin/python scripts/matrix.py --write
