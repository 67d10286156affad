#!/usr/bin/env bash
# Verify every kernel of every implementation here against the oracle. Makes .venv and installs on the first run.
set -euo pipefail
source "$(dirname "$0")/setup.sh" cu13
exec numba-psa verify "$@"
