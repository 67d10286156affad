"""What a weight file has to hold for a detector, and what is said where it does not."""

import json

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import helper
from yolo_cases import detector, picture, random_weights

from numba_psa.errors import WeightsError
from numba_psa.nn import yolo
from numba_psa.nn.files import read_metadata
from numba_psa.nn.yolo.architecture import FAMILIES, SCALES, Architecture, widths

MILLIONS = {
    "yolo11": {"n": 2.6, "s": 9.4, "m": 20.1, "l": 25.3, "x": 56.9},
    "yolo26": {"n": 2.4, "s": 9.5, "m": 20.4, "l": 24.8, "x": 55.7},
}
"""Published numbers of parameters with 80 classes."""


def parameters(family, scale, end2end):
    """Of all convolutions, batch norm folded."""
    convs, sizes = Architecture(family, scale, 80, end2end, sppf_silu=True).wanted()
    axes = [[factor * {"": 1, **sizes}[symbol] for factor, symbol in conv.weight_axes] for conv in convs]
    return sum(np.prod(shape) + shape[0] for shape in axes)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_scale_has_the_published_number_of_parameters(family, scale):
    assert round(parameters(family, scale, family == "yolo26") / 1e6, 1) == MILLIONS[family][scale]


def test_widths_of_the_smallest():
    assert widths("yolo26", "n") == [
        16, 32, 64, 64, 128, 128, 128, 256, 256, 256, 256, 256, 384, 128, 128, 256, 64, 64, 192, 128, 128, 384, 256, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(("family", "scale"), [("yolo11", "n"), ("yolo26", "s"), ("yolo11", "m"), ("yolo26", "l")])
def test_family_scale_and_classes_are_what_the_weights_say(family, scale, folded):
    model = detector(family, scale, 7, folded=folded)
    assert (model.family, model.scale, model.nc, model.stride) == (family, scale, 7, 32)
    assert model.names == {index: str(index) for index in range(7)}
    assert repr(model) == f"<{family}{scale} detector of 7 classes>"


def test_a_detector_shows_its_layers():
    lines = str(detector("yolo26")).splitlines()
    assert len(lines) == 25
    assert lines[11].split() == ["10", "C2PSA", "of", "9", "256", "channels"]
    assert lines[13].split() == ["12", "Concat", "of", "11,", "6", "384", "channels"]
    assert lines[24].split() == ["23", "Detect", "of", "16,", "19,", "22"]


def judge_report(state, *problems):
    """All problems are told at once, and no others."""
    with pytest.raises(WeightsError) as raised:
        yolo.Detector.from_state_dict(state)
    lines = str(raised.value).splitlines()[1:]
    assert len(lines) == len(problems), raised.value
    for problem in problems:
        assert any(problem in line for line in lines), (problem, raised.value)


def test_everything_wrong_is_listed_at_once():
    state = random_weights("yolo26", "n", 3)
    state["model.4.cv1.conv.weight"] = state["model.4.cv1.conv.weight"][:, :-1]
    state["model.7.bn.running_var"][3] = -1
    state["model.10.m.0.attn.pe.conv.weight"] = np.full((128, 1, 3, 3), np.nan, np.float32)
    state["model.13.m.1.cv1.conv.weight"] = np.zeros((1, 1, 1, 1), np.float32)
    del state["model.22.m.0.1.ffn.1.bn.bias"]
    state["model.23.one2one_cv2.1.2.bias"] = np.zeros(5, np.float32)
    judge_report(
        state,
        "model.4.cv1.conv.weight: has shape [64, 63, 1, 1], must be [64, 64, 1, 1]",
        "model.7.bn.running_var: holds negative variances",
        "model.10.m.0.attn.pe.conv.weight: holds NaN or inf",
        "model.13.m.1.cv1.conv.weight: unexpected",
        "model.22.m.0.1.ffn.1.bn.bias [128]: missing",
        "model.23.one2one_cv2.1.2.bias: has shape [5], must be [4]",
    )


def test_one_wrong_head_is_not_taken_for_many():
    state = random_weights("yolo11", "n", 4)
    state["model.23.cv3.1.2.weight"] = np.zeros((9, 64, 1, 1), np.float32)
    judge_report(state, "model.23.cv3.1.2.weight: has shape [9, 64, 1, 1], must be [4, 64, 1, 1]")


def test_weights_that_only_training_needs_are_passed_over():
    state = random_weights("yolo26", "n", 3)
    other = {
        name: array for name, array in random_weights("yolo26", "n", 3, end2end=False, seed=1).items() if ".23." in name
    }
    distribution = {"model.23.dfl.conv.weight": np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)}
    model = yolo.Detector.from_state_dict({**state, **other, **distribution, "onnx::Split_1": np.zeros(2, np.int64)})
    assert model.end2end
    np.testing.assert_array_equal(model(picture(1, 3, 32, 32)), yolo.Detector.from_state_dict(state)(picture(1, 3, 32, 32)))


def test_other_bins_are_told():
    state = random_weights("yolo11") | {"model.23.dfl.conv.weight": np.arange(1, 17, dtype=np.float32)}
    with pytest.raises(WeightsError, match="must be 0 to 15"):
        yolo.Detector.from_state_dict(state)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "there is no array of a layer"),
        ({"features.0.weight": np.zeros((4, 3, 3, 3))}, "there is no array of a layer"),
        ({"model.0.conv.weight": np.zeros((16, 3, 3, 3)), "model.22.cv3.0.2.weight": np.zeros((80, 80, 1, 1))}, "model.22"),
    ],
)
def test_what_is_no_detector_is_told(state, says):
    with pytest.raises(WeightsError, match=says):
        yolo.Detector.from_state_dict(state)


def test_a_width_that_no_scale_has_is_told():
    state = random_weights()
    state["model.0.conv.weight"] = np.zeros((24, 3, 3, 3), np.float32)
    with pytest.raises(WeightsError, match="no scale of yolo26 gives 24 channels"):
        yolo.Detector.from_state_dict(state)


# ---- what a file says beside its weights --------------------------------------------------------------------------------
def test_metadata_of_safetensors(tmp_path):
    metadata = {"names": str({0: "a cat", 1: "собака", 2: "x"}), "sppf_silu": "false", "imgsz": "[640, 640]"}
    state = random_weights("yolo11")
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors", metadata)
    assert read_metadata(tmp_path / "model.safetensors") == metadata
    model = yolo.load(tmp_path / "model.safetensors")
    assert model.names == {0: "a cat", 1: "собака", 2: "x"}
    assert model.metadata == metadata
    assert not model.layers[9].cv1.silu
    assert yolo.load(tmp_path / "model.safetensors", sppf_silu=True).layers[9].cv1.silu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activated", [False, True])
def test_a_graph_shows_whether_sppf_has_an_activation(tmp_path, family, activated):
    nodes = [helper.make_node("Conv", ["x", "model.9.cv1.conv.weight"], ["y"])]
    nodes += [helper.make_node("Sigmoid" if activated else "Identity", ["y"], ["z"])]
    arrays = [onnx.numpy_helper.from_array(array, name) for name, array in random_weights(family, folded=True).items()]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xz"]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], arrays))
    helper.set_model_props(model, {"names": "['a', 'b', 'c']"})
    onnx.save(model, tmp_path / "model.onnx")
    found = yolo.load(tmp_path / "model.onnx")
    assert found.layers[9].cv1.silu is activated
    assert found.names == {0: "a", 1: "b", 2: "c"}


def test_families_differ_in_sppf_where_nothing_is_said():
    assert detector("yolo11").layers[9].cv1.silu
    assert not detector("yolo26").layers[9].cv1.silu


@pytest.mark.parametrize("names", ["{0: 'a'}", "[1", "__import__('os')", "{0: 'a', 1: 'b', 3: 'c'}", "7", "(" * 5000])
def test_names_that_name_no_classes_are_told(names):
    with pytest.raises(WeightsError, match="metadata names"):
        detector(metadata={"names": names})


def test_an_activation_neither_true_nor_false_is_told():
    with pytest.raises(WeightsError, match="sppf_silu must be 'true' or 'false', got 'maybe'"):
        detector(metadata={"sppf_silu": "maybe"})


def test_the_file_is_named(tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, **{"model.0.conv.weight": np.zeros((16, 3, 3, 3))})
    with pytest.raises(WeightsError, match=json.dumps(str(path))[1:-1]):
        yolo.load(path)
