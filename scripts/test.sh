#!/bin/sh
# Everything that must hold: lint, types, the whole suite on the newest JAX, the core of it on the oldest, and on
# the versions between what follows a version most closely.
# Runs all of it, whatever fails on the way, and closes with a summary. Arguments go to every pytest.
set -u
cd "$(dirname "$0")/.." || exit 1
jobs=${JOBS:-2}
started=$(date +%s)
summary= failed=

step() { # step NAME COMMAND...
    name=$1; shift
    printf '\n== %s\n' "$name"
    began=$(date +%s)
    if "$@"; then verdict=ok; else verdict=FAILED failed=yes; fi
    summary="$summary$(printf '%-8s%-32s%5d s' "$verdict" "$name" $(($(date +%s) - began)))
"
}

tests() { # tests ENVIRONMENT [pytest's arguments]
    python=$1/bin/python; shift
    JAX_PLATFORMS=cpu "$python" -m pytest -n "$jobs" --dist worksteal --durations 5 "$@"
}

old() { # old VERSION [pytest's arguments]: an environment for that JAX, and the core of the suite in it
    version=$1; shift
    sh scripts/bootstrap.sh "jax-$version" || return
    tests ".venv-jax-$version" -m core "$@" && return
    [ $? -eq 5 ] && [ $# -gt 0 ] && echo "No core test among those asked for."
}

sh scripts/bootstrap.sh || exit 1
newest=$(.venv/bin/python -c 'import jax; print(jax.__version__)') || exit 1
step "lint" .venv/bin/python -m ruff check -q .
step "types" .venv/bin/python -m basedpyright --level error
step "all tests, JAX $newest" tests .venv "$@"
between=  # the first of the older versions is the oldest: it has the whole core
for file in constraints/jax-*.txt; do
    version=${file#constraints/jax-}
    version=${version%.txt}
    if [ -n "$between" ] && [ $# -eq 0 ]; then set -- $between; fi
    step "core tests, JAX $version" old "$version" "$@"
    between="tests/test_core.py tests/test_hijax.py tests/test_seed.py tests/test_specs.py"
done

printf '\n%s' "$summary"
[ -z "$failed" ] && echo "All well in $(($(date +%s) - started)) s." && exit
echo "Failed: see above."
exit 1
