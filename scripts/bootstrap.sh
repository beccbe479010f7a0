#!/bin/sh
# Makes the environment that the other commands run in, and does nothing if it is there and up to date.
#
#     sh scripts/bootstrap.sh              .venv              the newest JAX, the tools, the demo's model
#     sh scripts/bootstrap.sh jax-0.11.1   .venv-jax-0.11.1   what the tests need, on that JAX
#     sh scripts/bootstrap.sh --python     print the Python that would be used
#     sh scripts/bootstrap.sh --uv         print the uv that would be used
#
# It needs a Python >= 3.12, found under any usual name or in a version manager, or any Python 3 with pip,
# through which uv comes and brings a Python. PYTHON=/path/to/python decides for itself. uv, if it can be
# had, installs; otherwise, or with TYPAX_NO_UV=1, pip does. Both obey constraints/.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$(pwd -P)
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0 PIP_USER=0
minors="3.12 3.13 3.14"  # in order of preference: the oldest first, so that nothing newer slips in
locked=

say() { echo "typax: $*" >&2; }
die() { say "$*"; exit 1; }

# --- a Python ------------------------------------------------------------------------------------------
# A name on the PATH proves nothing (a version manager's shim may refuse to run; Debian's Python may lack
# venv), so every candidate is run.

runs() { # runs PYTHON [MODULE...]: is it a release of CPython that we support, with these modules?
    candidate=$1; shift
    "$candidate" -I -c "
import sys, sysconfig
assert sys.implementation.name == 'cpython' and not sysconfig.get_config_var('Py_GIL_DISABLED')
assert '%d.%d' % sys.version_info[:2] in '$minors'.split() and sys.version_info.releaselevel == 'final'
for module in sys.argv[1:]: __import__(module)
" "$@" </dev/null >/dev/null 2>&1
}

candidates() { # one a line; patterns that match nothing stay as they are and fail to run
    data=${XDG_DATA_HOME:-$HOME/.local/share}
    for v in $minors; do
        echo "python$v"
    done
    echo python3
    echo python
    for v in $minors; do
        for p in \
            "${PYENV_ROOT:-$HOME/.pyenv}/versions/$v"*/bin/python \
            "${UV_PYTHON_INSTALL_DIR:-$data/uv/python}/cpython-$v"*/bin/python3 \
            "${ASDF_DATA_DIR:-$HOME/.asdf}/installs/python/$v"*/bin/python \
            "${MISE_DATA_DIR:-$data/mise}/installs/python/$v"*/bin/python \
            "$HOME/.rye/py/cpython@$v"*/bin/python3 \
            "$HOME/.local/bin/python$v" \
            "/usr/local/bin/python$v" "/usr/local/opt/python@$v/bin/python$v" \
            "/opt/homebrew/bin/python$v" "/opt/homebrew/opt/python@$v/bin/python$v" \
            "/home/linuxbrew/.linuxbrew/bin/python$v" "/opt/local/bin/python$v" \
            "/Library/Frameworks/Python.framework/Versions/$v/bin/python3" \
            "/usr/bin/python$v" "/opt/python/$v"*/bin/python3
        do
            echo "$p"
        done
    done
    for conda in "${CONDA_ROOT:-/opt/conda}" "$HOME"/miniconda3 "$HOME"/anaconda3 "$HOME"/miniforge3 \
        "$HOME"/mambaforge "$HOME"/micromamba "$HOME"/.conda /opt/miniconda3 /opt/anaconda3 /opt/miniforge3
    do
        for p in "$conda"/bin/python3 "$conda"/envs/*/bin/python3; do
            echo "$p"
        done
    done
}

find_python() { # sets python, and complete=yes if it can make environments by itself
    python= complete=
    if [ -n "${PYTHON:-}" ]; then
        runs "$PYTHON" || die "PYTHON=$PYTHON is not a release of CPython ${minors%% *} to ${minors##* } that runs."
        python=$PYTHON
        runs "$python" venv ensurepip && complete=yes
        return
    fi
    old_ifs=$IFS
    IFS='
'
    set -f
    for p in $(set +f; IFS=$old_ifs; candidates); do
        if runs "$p" venv ensurepip; then
            python=$p complete=yes
            break
        elif [ -z "$python" ] && runs "$p"; then
            python=$p  # uv can make an environment for it, if nothing better comes
        fi
    done
    set +f
    IFS=$old_ifs
}

# --- uv: the one at hand, or one of our own in .uv, brought by any Python 3 that can --------------------

find_uv() {
    for uv in uv "$root/.uv/bin/uv" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        "$uv" --version >/dev/null 2>&1 && return
    done
    uv=
    return 1
}

get_uv() {
    [ -z "${TYPAX_NO_UV:-}" ] || { uv=; return 1; }
    find_uv && return
    for p in ${python:+"$python"} python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3*/bin/python; do
        "$p" -I -c 'import sys; assert sys.version_info >= (3, 8)' </dev/null >/dev/null 2>&1 || continue
        [ -n "${told:-}" ] || say "getting uv, which installs quickly"
        told=yes
        rm -rf .uv
        "$p" -m venv .uv >/dev/null 2>&1 &&
            .uv/bin/python -m pip install -q -c constraints/constraints.txt uv >/dev/null 2>&1 &&
            find_uv && return
        rm -rf .uv
        "$p" -m pip install -q --target .uv -c constraints/constraints.txt uv >/dev/null 2>&1 &&
            find_uv && return
        rm -rf .uv
    done
    return 1
}

# --- the environment -----------------------------------------------------------------------------------

fingerprint() { # of all that decides what is in it
    { echo "$root"; sed '/^\[tool\./,$d' pyproject.toml
      cat constraints/*.txt scripts/bootstrap.sh; } | cksum
}

build() { # build WITH: how to install, uv or pip
    rm -rf "$env"
    if [ "$1" = uv ]; then
        "$uv" venv -q --no-project --python "${python:->=${minors%% *},<3.$((${minors##*.} + 1))}" "$env" || return
        install() { "$uv" pip install -q --python "$env/bin/python" "$@"; }
    else
        "$python" -m venv "$env" || return
        install() { "$env/bin/python" -m pip install -q "$@"; }
    fi
    pins="$env/constraints.txt"
    if [ -n "$jax" ]; then
        { grep -v '^jax\(lib\)\{0,1\}==' constraints/constraints.txt; cat "constraints/$jax.txt"; } >"$pins"
    else
        cp constraints/constraints.txt "$pins"
    fi
    install -c "$pins" -e ".[$extra]" || return
    if [ -z "$jax" ]; then
        install --no-deps -r constraints/models.txt || return
    fi
    "$env/bin/python" -c 'import jax'
}

only_one() { # two commands at once: the second waits for the first
    lock=$env.lock
    until ln -s $$ "$lock" 2>/dev/null; do
        owner=$(readlink "$lock") && ! kill -0 "$owner" 2>/dev/null && rm -f "$lock"  # left behind
        sleep 1  # in which whoever saw that too removes it too, before anyone makes a new one
    done
    locked=yes
}

base() { "$1" -I -c 'import sys; print(sys.base_prefix)' 2>/dev/null; }

up_to_date() { # finished, from what lies here now, and by a Python that is still there (by PYTHON, if that is set)
    [ "$(cat "$env/typax-stamp" 2>/dev/null)" = "$(fingerprint)" ] || return
    at=$(base "$env/bin/python") || return
    [ -z "${PYTHON:-}" ] || [ "$at" = "$(base "$PYTHON")" ]
}

trap '[ -z "$locked" ] || rm -f "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

jax= extra=dev env=.venv
case ${1:-} in
'') ;;
--python)
    find_python
    [ -n "$python" ] || exit 1
    echo "$python"
    exit
    ;;
--uv)
    find_python
    get_uv || die "uv is needed for this: install it."
    echo "$uv"
    exit
    ;;
*)
    jax=$1 extra=test env=.venv-$1
    [ -f "constraints/$jax.txt" ] || die "there is no constraints/$jax.txt."
    ;;
esac

up_to_date && exit
only_one
up_to_date && exit  # another command made it meanwhile

find_python
get_uv
if [ -z "$python" ] && [ -z "$uv" ]; then
    die "install Python 3.12, 3.13 or 3.14 (or set PYTHON=/path/to/it): none was found, nor a Python 3 with pip to get one by."
elif [ -z "$complete" ] && [ -z "$uv" ]; then
    die "$python can neither make environments nor run pip: install its venv module (on Debian: apt install python3-venv)."
fi

say "setting up $env: $("${python:-$uv}" --version 2>&1)"
if [ -z "$python" ]; then  # does uv find or download one? Then go on as if we had found it
    "$uv" python install -q --no-progress 3.12 >/dev/null 2>&1
    python=$("$uv" python find --no-project --managed-python ">=3.12,<3.15" 2>/dev/null) && runs "$python" ||
        die "install Python 3.12, 3.13 or 3.14 (or set PYTHON=/path/to/it): none was found, and uv could not download one."
    runs "$python" venv ensurepip && complete=yes
fi
{ [ -n "$uv" ] && build uv; } || {
    [ -n "$complete" ] && { [ -z "$uv" ] || say "uv could not do it: trying pip"; } && build pip
} || die "the packages could not be installed: the error is above; is a package index reachable?"
fingerprint >"$env/typax-stamp"
