#!/usr/bin/env bash
# Makes .venv in this checkout: Python 3.11, the pinned packages of requirements/lock.txt, strawflow itself (editable), and
# the Debian packages the tests need. Done once per content of lock.txt and pyproject.toml; afterwards it returns at once.
#
# For laptops, CI and tests, so torch must be a CPU build. Where the configured registry offers only CUDA builds, name one
# that has CPU builds:  STRAWFLOW_TORCH_INDEX=URL make setup
# On GPU hosts install the extras of pyproject.toml the way SGLang and Megatron-core document it instead.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
LOCK=requirements/lock.txt
STAMP=$VENV/.setup-stamp

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: FAILED: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if command -v "$candidate" >/dev/null &&
            [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = 3.11 ]; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 is needed and was not found (Debian 12: apt-get install python3 python3-venv)"
}

# install_debian REASON PACKAGE...: as root or through sudo without a password; else says what to type and returns 1
install_debian() {
    local reason=$1 as_root=()
    shift
    if ! command -v apt-get >/dev/null; then
        say "$reason; there is no apt-get here: install it by hand ($*)"
        return 1
    fi
    if [ "$(id -u)" != 0 ]; then
        if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
            say "$reason; this needs root. Type: sudo apt-get install $*"
            return 1
        fi
        as_root=(sudo)
    fi
    say "$reason: installing $*"
    "${as_root[@]}" apt-get update -qq >/dev/null &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

has_postgres() { compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; }

if ! has_postgres && ! install_debian "PostgreSQL is missing" postgresql; then
    say "going on without PostgreSQL: 'make quickstart' does not need it, 'make test' will fail"
fi

if ! command -v faketime >/dev/null && ! install_debian "faketime is missing" faketime; then
    say "going on without faketime: 'make quickstart' does not need it, 'make test' will fail"
fi

fingerprint=$(cat "$LOCK" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
is_done() { [ -x $VENV/bin/strawflow ] && [ "$(cat $STAMP 2>/dev/null)" = "$fingerprint" ]; }
if is_done; then
    say "up to date"
    exit 0
fi

mkdir -p $VENV
exec 9>$VENV/.setup-lock
flock 9 # another set-up of this checkout is at work; what it did counts
if is_done; then
    say "up to date"
    exit 0
fi
started=$SECONDS

if [ ! -x $VENV/bin/pip ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip' 2>/dev/null ||
        install_debian "Python's venv module is missing" python3-venv ||
        fail "no virtual environment can be made without it"
    say "making $VENV with $python"
    "$python" -m venv $VENV
fi
has_compiler() {
    command -v gcc >/dev/null &&
        [ -f "$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
}
# one package of the lock (pycosat, used by reasoning_gym) comes as C source only
has_compiler || install_debian "a C compiler or Python's headers are missing" gcc libc6-dev python3-dev ||
    fail "a package of the lock cannot be built without them"

# Modules are compiled when they are first imported, which most of them never are; those that every command imports here.
install() { $VENV/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-compile --no-deps "$@"; }

torch=$(grep '^torch==' "$LOCK")
say "installing $torch"
install --only-binary :all: ${STRAWFLOW_TORCH_INDEX:+--index-url "$STRAWFLOW_TORCH_INDEX"} "$torch" ||
    fail "$torch could not be installed"

say "installing $(grep -c '==' "$LOCK") pinned packages"
install -r "$LOCK" || fail "pip could not install $LOCK"
install --no-build-isolation -e . || fail "strawflow itself could not be installed"
$VENV/bin/python -m compileall -q -j 0 \
    $VENV/lib/python3.11/site-packages/{alembic,sqlalchemy,mako,pydantic,typer,click,rich,fsspec,yaml} >/dev/null || true

$VENV/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' ||
    fail "torch does not load or is a CUDA build; set STRAWFLOW_TORCH_INDEX to a registry with CPU builds and run again"

echo "$fingerprint" >$STAMP
say "done in $((SECONDS - started)) s"
