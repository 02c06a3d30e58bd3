#!/usr/bin/env bash
# Installs torch in an environment of make_venv.sh that sees none: get_torch.sh FOLDER TORCH_REQUIREMENT.
set -euo pipefail
venv=$1 torch=$2

usable_torch='
import sys, torch
sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'

if ! "$venv/bin/python" -c "$usable_torch" 2>/dev/null; then
    echo "installing $torch, as ${PYTHON:-python3} has no torch>=2.11; for another build see docs/installation.md"
    # Without warnings, as the groups' packages may still lack what they need. Unquoted: TORCH may hold options of pip
    # besides the requirement.
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --no-compile \
        --no-warn-conflicts $torch
fi
# Without NumPy, which comes later, importing torch warns.
"$venv/bin/python" -W ignore -c 'import torch; print("using torch", torch.__version__, "from", torch.__path__[0])'
