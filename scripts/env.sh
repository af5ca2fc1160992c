# shellcheck shell=bash
# To be sourced. use_env ROOT [EXTRA] sets up ROOT/.venv with the project (editable) and one of its extras, and puts it on
# PATH. PYTHON names the interpreter to build it from (default python3). It installs only when pyproject.toml, setup.py,
# the kernels in C++ or the place of the checkout have changed. TORCH names the torch, and pip's own variables where it
# comes from. It never installs torch_npu.

TORCH="${TORCH:-torch==2.13.0}"

use_env() {
    local lock
    # One at a time: another script may be setting up the same environment. Systems other than Linux have no flock.
    if command -v flock >/dev/null; then
        exec {lock}<"$1"
        flock --nonblock "$lock" || { echo "env: waiting for another script that sets up $1/.venv" >&2 && flock "$lock"; }
        set_up_env "$@"
        exec {lock}<&- # a server that is started now would keep it
    else
        set_up_env "$@"
    fi
}

set_up_env() {
    local root=$1 extra=${2:-} python=${PYTHON:-python3} venv="$1/.venv" wanted
    wanted=$(cd "$root" && { echo "$TORCH" && cat pyproject.toml setup.py lopa_ascend/backend/cpu/native/*.{cpp,h}; } | cksum)

    if [[ -e $venv/installing ]]; then
        echo "env: the last installation into $venv did not finish; starting afresh" >&2
        make_venv "$python" "$venv"
    # venv writes bin/activate last, with its own path in it: so this also notices a half-made or a moved environment.
    elif ! grep -qsF "$venv" "$venv/bin/activate" || ! "$venv/bin/python" -c "" 2>/dev/null; then
        make_venv "$python" "$venv"
    fi
    export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    unset PYTHONHOME

    grep -qsxF "$wanted" "$venv/installed-${extra:-base}" && return
    # An installation with an extra has everything that one without has.
    [[ -z $extra ]] && grep -qsxF "$wanted" "$venv"/installed-* && return
    echo "env: installing $TORCH and the project${extra:+ with its $extra tools} into $venv (minutes, once)" >&2
    touch "$venv/installing"
    # torch first, by itself, so that later installations find it and do not choose another version.
    (
        cd "$root" || exit
        python -m pip install --quiet --disable-pip-version-check "$TORCH"
        python -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    )
    echo "$wanted" >"$venv/installed-${extra:-base}"
    rm "$venv/installing"
}

# make_venv PYTHON VENV: an empty environment, or an error that says what is missing.
make_venv() {
    local python=$1 venv=$2
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "env: $python is missing or older than Python 3.10; name another one: PYTHON=python3.11 $0" >&2
        exit 1
    fi
    if ! "$python" -c "import ensurepip, venv" 2>/dev/null; then
        echo "env: $python has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv) and try again" >&2
        exit 1
    fi
    "$python" -m venv --clear "$venv"
}
