#!/usr/bin/env bash
# Lint and every test that this machine can run. Makes .venv and installs on the first run. GPU tests skip without a GPU.
set -euo pipefail
source "$(dirname "$0")/setup.sh" dev
ruff format --check src tests scripts
ruff check src tests scripts
bash scripts/fetch_models.sh # trained weights for tests/host/test_nn_trained.py, checked by sha256, never committed
python -m pytest --quiet tests/gpu "$@"
python -m pytest -n auto --dist worksteal tests/host tests/meta "$@"
NUMBA_ENABLE_CUDASIM=1 python -m pytest -n auto --dist worksteal tests/sim "$@"
