#!/usr/bin/env bash
# Lint and every test that this machine can run. Makes .venv and installs on the first run. GPU tests skip without a GPU.
set -euo pipefail
source "$(dirname "$0")/setup.sh" dev
ruff format --check src tests scripts
ruff check src tests scripts
python -m pytest tests/host tests/meta "$@"
NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/sim "$@"
python -m pytest tests/gpu "$@"
