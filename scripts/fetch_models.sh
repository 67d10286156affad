#!/usr/bin/env bash
# Trained weights for the tests and examples, into .models/ (never committed: their metadata names AGPL-3.0).
#
#   yolo26n.onnx  a YOLO26n from the wheel isbnx 0.0.18
#   yolo11n.pt    a YOLO11n from the wheel ir-yolo-tracker 0.1.2 (a pickle: nothing here loads it)
#
# Only the model file is taken out of each wheel; wheel and model are checked against the sums below. PYTHON may name another
# interpreter, MODELS another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
models=${MODELS:-.models}
python=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
mkdir -p "$models"

matches() { # SHA256 FILE
  test -f "$2" && echo "$1  $2" | sha256sum --check --status
}

fetch() { # REQUIREMENT WHEEL SHA256 MEMBER TARGET SHA256
  local requirement=$1 wheel=$downloads/$2 wheel_sum=$3 member=$4 target=$models/$5 sum=$6
  if matches "$sum" "$target"; then
    echo "$target: present"
    return
  fi
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$downloads" "$requirement"
  matches "$wheel_sum" "$wheel" || { echo "fetch_models: $2 is not the file that was expected" >&2; exit 1; }
  "$python" - "$wheel" "$member" "$downloads/model" <<'PY'
import sys, zipfile
wheel, member, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive, open(target, "wb") as file:
    file.write(archive.read(member))
PY
  matches "$sum" "$downloads/model" || { echo "fetch_models: $member is not the file that was expected" >&2; exit 1; }
  mv "$downloads/model" "$target"
  echo "$target: fetched"
}

fetch isbnx==0.0.18 isbnx-0.0.18-py3-none-any.whl \
  ef7662c5b6e8882e12327bb8f57d36be3d4eb23d5d55011b4442ee3f7a5c1356 \
  isbnx/model/best.onnx yolo26n.onnx b75bf231391623513477ea2b860efae2a492f28e7e6e85c8921d8f57928a81f7
fetch ir-yolo-tracker==0.1.2 ir_yolo_tracker-0.1.2-py3-none-any.whl \
  a7fae71fa0241baad92b30c28df3b1ba006b741c2b8383a9af97ca6c167e7601 \
  ir_yolo_tracker/models/pseudo_ir_marker_ball_yolo11n.pt yolo11n.pt 961d368171d647fbbe3955aa7e74697e1bee1492f640a55ce824eee8f567f488
