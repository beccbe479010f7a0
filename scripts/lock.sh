#!/bin/sh
# Pins every package, direct or not, for all the Pythons that typax supports: constraints/constraints.txt.
set -eu
cd "$(dirname "$0")/.."
uv=$(sh scripts/bootstrap.sh --uv)
new=constraints/constraints.txt.new
trap 'rm -f "$new"' EXIT
{
    echo "# Every package that the environments take, on every supported Python: written by make lock."
    "$uv" pip compile -q pyproject.toml --all-extras --universal --python-version 3.12 \
        --no-annotate --no-header --no-emit-index-url --no-emit-find-links
} >"$new"
mv "$new" constraints/constraints.txt
