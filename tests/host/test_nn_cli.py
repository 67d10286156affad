"""`numba-psa infer` and `numba-psa weights`: what is written, and one clear line for what cannot be done."""

import numpy as np
import pytest
from layer_cases import FIXTURES, fixture, normal
from PIL import Image
from typer.testing import CliRunner

from numba_psa import nn
from numba_psa.cli import app
from numba_psa.devices import gpu_problem
from numba_psa.testing.layers import random_state

C2PSA = next(path for path in FIXTURES if path.stem == "c2psa_c128_n2")


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def x(tmp_path):
    layer, x, _, _ = fixture(C2PSA)
    np.save(tmp_path / "x.npy", x)
    return tmp_path / "x.npy", layer, x


def test_infer_writes_what_the_layer_gives(tmp_path, x):
    path, layer, array = x
    for impl in ("cpu", "oracle"):
        result = run(
            "infer", "--weights", C2PSA, "--prefix", "", "--input", path, "--output", tmp_path / "y.out", "--impl", impl
        )
        assert result.exit_code == 0, result.stderr
        assert "C2PSA): float32 [2, 128, 2, 3] -> [2, 128, 2, 3]" in result.stdout
        np.testing.assert_array_equal(np.load(tmp_path / "y.out"), layer(array, impl))


def test_the_heatmap_is_the_attention_map(tmp_path, x):
    path, layer, array = x
    arguments = ("--prefix", "", "--input", path, "--query", "1,2", "--block", 1)
    result = run("infer", "--weights", C2PSA, *arguments, "--heatmap", tmp_path / "map.png")
    assert result.exit_code == 0, result.stderr
    weights = layer.attention_map(array, (1, 2), 0, 1)[0]
    brightness = np.asarray(Image.open(tmp_path / "map.png").convert("L"), float)[16::32, 16::32]
    assert brightness.shape == weights.shape
    np.testing.assert_array_equal(np.argsort(brightness, axis=None), np.argsort(weights, axis=None))
    peak = np.unravel_index(weights.argmax(), weights.shape)
    assert f"most at {peak[0]},{peak[1]} ({weights.max():.3f})" in result.stdout


def test_weights_lists_the_layers(tmp_path):
    state = {}
    for prefix, layer in (("model.10", nn.C2PSA), ("model.22", nn.C3k2)):
        sizes = {"c": 128, "qkv": 256, "c_in": 200, "c_out": 300, "e": 64}
        state |= {f"{prefix}.{name}": array for name, array in random_state(layer, sizes, 2).items()}
    np.savez(tmp_path / "w.npz", **state)
    result = run("weights", tmp_path / "w.npz", "--imgsz", 320)
    assert result.exit_code == 0, result.stderr
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "model" in line]
    assert lines == [
        ["model.10", "C2PSA", "200 -> 200", "2", "2", "32", "64", "10×10 = 100"],
        ["model.22", "C3k2", "200 -> 300", "2", "2", "32", "64", "10×10 = 100"],
    ]


def test_weights_names_a_layer_that_is_damaged(tmp_path):
    state = {f"model.10.{name}": a for name, a in random_state(nn.C2PSA, {"c": 64, "qkv": 128, "c_in": 128}).items()}
    del state["model.10.cv2.conv.weight"]
    np.savez(tmp_path / "w.npz", **state)
    result = run("weights", tmp_path / "w.npz")
    assert result.exit_code == 1
    assert "cv2.conv.weight [128, 128, 1, 1]: missing" in result.stderr


def test_what_cannot_be_done_is_one_clear_line(tmp_path, x):
    path, _, _ = x
    (tmp_path / "text.npy").write_text("no array")
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "image.png")
    np.save(tmp_path / "wrong.npy", normal(1, 64, 3, 4))
    np.save(tmp_path / "nan.npy", np.full((1, 128, 2, 3), np.nan, np.float32))
    np.savez(tmp_path / "none.npz", x=np.zeros(3))
    infer = ("infer", "--weights", C2PSA, "--prefix", "")
    write = ("--output", tmp_path / "y.npy")
    draw = ("--heatmap", tmp_path / "map.png")
    for arguments, message in (
        ((*infer, "--input", path), "give --output, --heatmap or both"),
        ((*infer[:3], "--input", path, *write), "there is (no prefix) (C2PSA)"),
        ((*infer, "--input", tmp_path / "text.npy", *write), "text.npy is no .npy file"),
        ((*infer, "--input", tmp_path / "none.npy", *write), "No such file"),
        ((*infer, "--input", tmp_path / "wrong.npy", *write), "x has 64 channels"),
        ((*infer, "--input", path, *write, "--impl", "gpu"), "impl must be one of"),
        ((*infer, "--input", path, *write, "--num-heads", 3), "num_heads = 3 does not fit 64 channels"),
        ((*infer, "--input", tmp_path / "image.png", *write), "give the network as .onnx"),
        ((*infer, "--input", tmp_path / "none.npz", *write), "is no picture"),
        ((*infer, "--input", path, *draw, "--query", "here"), "--query must be two numbers y,x"),
        ((*infer, "--input", path, *draw, "--query", "2,0"), "query y must be 0 to 1, got 2"),
        ((*infer, "--input", path, *draw, "--head", 1), "head must be 0 to 0"),
        ((*infer, "--input", tmp_path / "nan.npy", *draw), "makes the attention NaN"),
        ((*infer, "--input", path, "--heatmap", tmp_path / "map.what"), "unknown file extension"),
        ((*infer, "--input", path, *write, "--imgsz", 10**9), "16384"),
        (("weights", tmp_path / "none.npz"), "holds no attention layer"),
        (("weights", tmp_path / "model.pt"), "is a pickle"),
        (("weights", C2PSA, "--imgsz", 0), "imgsz must be at least 1"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr, (arguments, result.stderr)


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
@pytest.mark.parametrize("impl", ["cuda", "mirror"])
def test_infer_without_a_gpu_says_what_is_missing(tmp_path, x, impl):
    arguments = ("--prefix", "", "--input", x[0], "--output", tmp_path / "y.npy", "--impl", impl)
    result = run("infer", "--weights", C2PSA, *arguments)
    assert result.exit_code == 2
    assert f"impl='{impl}' needs a CUDA GPU" in result.stderr
    assert not (tmp_path / "y.npy").exists()
