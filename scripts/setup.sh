# Sourced by the other scripts: makes .venv beside the sources if there is none, installs the package with the given extra
# if the requirements changed, and puts .venv first on PATH.
extra=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "numba-psa needs Python 3.11 or later as python3, or named by the variable PYTHON" >&2
    exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PATH="$root/.venv/bin:$PATH"
stamp=.venv/numba-psa-$extra
if ! cmp -s pyproject.toml "$stamp"; then
    python -m pip install --quiet --disable-pip-version-check -e ".[$extra]"
    cp pyproject.toml "$stamp"
fi
