#!/usr/bin/env bash
# Makes a virtual environment with pip, in which $PYTHON sees its own torch if that can be used: make_venv.sh FOLDER.
set -euo pipefail
venv=$1 python=${PYTHON:-python3}

usable_torch='
import sys, torch
sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "offload needs Python 3.11 or newer; $python is not. Set PYTHON, as in: make PYTHON=python3.12 ..." >&2
    exit 1
fi

"$python" -m venv --clear --without-pip "$venv"

# A torch that is already there was chosen for this machine's GPU and driver, so let the environment see it. Not
# by --system-site-packages: if $python is in a virtual environment, that means the packages below that one.
if "$python" -c "$usable_torch" 2>/dev/null; then
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$site/outer.pth"
fi

# Debian's python3 has venv but not ensurepip (that is the package python3-venv), so the interpreter's own
# pip installs the first one. Dependency groups need pip 25.1.
if ! "$python" -m pip --python "$venv/bin/python" --disable-pip-version-check install --quiet 'pip>=25.1'; then
    echo "$python -m pip could not install pip into $venv. It must be pip 22.3 or newer;" \
        "on Debian: apt install python3-pip" >&2
    exit 1
fi
