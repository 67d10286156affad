"""Weights: file formats, names, sizes, batch norm, and every way in which a file can be wrong."""

import json
import pickle

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from layer_cases import normal

from numba_psa import nn
from numba_psa.errors import NumbaPSAError, ShapeError, WeightsError
from numba_psa.nn.conv import fold
from numba_psa.nn.discover import attention_layers, layer_class
from numba_psa.nn.files import read_state
from numba_psa.testing.layers import random_state

SIZES = {"c": 12, "qkv": 24, "c_in": 17, "c_out": 19, "e": 7}
LAYERS = (nn.Attention, nn.PSABlock, nn.C2PSA, nn.PSA, nn.C3k2)


def state_of(layer=nn.C2PSA, units=1, prefix="", **options):
    return {prefix + name: array for name, array in random_state(layer, SIZES, units, **options).items()}


def message(error: type[Exception], function, *arguments, **keywords) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **keywords)
    return str(caught.value)


# ---- files ------------------------------------------------------------------------------------------------------------
def write_onnx(state, path):
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in state.items()]
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [value], [value], tensors)
    onnx.save(onnx.helper.make_model(graph), path)


WRITERS = {
    ".npz": lambda state, path: np.savez(path, **state),
    ".safetensors": lambda state, path: safetensors.numpy.save_file(state, path),
    ".onnx": write_onnx,
}


def bfloat16_file(state) -> bytes:
    """A .safetensors file: the length of the header, the header as JSON, the arrays."""
    header, content = {}, b""
    for name, array in state.items():
        data = array.tobytes()
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": offsets}
        content += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_all_formats_give_the_same_layer(tmp_path, suffix, layer):
    state, path = state_of(layer, prefix="model.7."), tmp_path / f"weights{suffix.upper()}"
    WRITERS[suffix](state, tmp_path / f"weights{suffix}")
    (tmp_path / f"weights{suffix}").rename(path)
    x = normal(1, 12 if layer in (nn.Attention, nn.PSABlock) else 17, 3, 4)
    expected = layer.from_state_dict(state, "model.7")(x, "oracle")
    np.testing.assert_array_equal(layer.from_file(path, prefix="model.7")(x, "oracle"), expected)


def test_the_default_prefix_is_where_yolo_has_the_layer(tmp_path):
    for layer, prefix in ((nn.C2PSA, "model.10."), (nn.C3k2, "model.22."), (nn.Attention, "model.10.m.0.attn.")):
        path = tmp_path / f"{prefix}npz"
        np.savez(path, **state_of(layer, prefix=prefix))
        assert isinstance(layer.from_file(path), layer)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda dtype: np.dtype(dtype).name)
def test_weights_of_other_dtypes(tmp_path, dtype):
    state = {name: array.astype(dtype) for name, array in state_of(folded=True).items()}
    x = normal(1, 17, 3, 4)
    expected = nn.C2PSA.from_state_dict({name: array.astype(np.float64) for name, array in state.items()})(x, "oracle")
    if dtype == ml_dtypes.bfloat16:  # safetensors.numpy writes no bfloat16
        (tmp_path / "w.safetensors").write_bytes(bfloat16_file(state))
    else:
        safetensors.numpy.save_file(state, tmp_path / "w.safetensors")
    write_onnx(state, tmp_path / "w.onnx")
    for name in ("w.safetensors", "w.onnx"):
        np.testing.assert_array_equal(nn.C2PSA.from_file(tmp_path / name, "")(x, "oracle"), expected)


class Payload:
    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path, suffix):
    path = tmp_path / f"best one{suffix}"
    path.write_bytes(pickle.dumps(Payload()))
    text = message(WeightsError, nn.C2PSA.from_file, path)
    assert f"{path} is a pickle" in text
    assert text.endswith(f"numba-psa convert '{path}'")


def test_pickles_inside_npz_are_not_loaded(tmp_path):
    np.savez(tmp_path / "w.npz", x=np.array([Payload()], object))
    assert "w.npz" in message(WeightsError, read_state, tmp_path / "w.npz")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".onnx"])
@pytest.mark.parametrize("content", [b"", b"\0", b"PK\x03\x04rubbish", b"\xff" * 64])
def test_rubbish_is_one_clear_line(tmp_path, suffix, content):
    path = tmp_path / f"rubbish{suffix}"
    path.write_bytes(content)
    assert str(path) in message(WeightsError, read_state, path)


def test_other_files_are_refused(tmp_path):
    assert ".safetensors, .npz, .onnx" in message(WeightsError, read_state, tmp_path / "weights.bin")
    message(FileNotFoundError, read_state, tmp_path / "none.npz")


# ---- batch norm -------------------------------------------------------------------------------------------------------
def test_folding_is_batch_norm_after_the_convolution():
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((5, 3, 1, 1)), rng.standard_normal(3)
    norm = {"weight": rng.standard_normal(5), "bias": rng.standard_normal(5), "running_mean": rng.standard_normal(5)}
    norm["running_var"] = np.array([0.0, 1e-6, 1e-3, 1.0, 1e6])
    folded, bias = fold(weight, norm)
    y = weight[:, :, 0, 0] @ x
    expected = norm["weight"] * (y - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-3) + norm["bias"]
    np.testing.assert_allclose(folded[:, :, 0, 0] @ x + bias, expected, rtol=1e-12)


def test_folded_and_not_folded_weights_mix():
    state, x = state_of(), normal(1, 17, 3, 4)
    expected = nn.C2PSA.from_state_dict(state)(x, "oracle")
    weight, bias = fold(state["cv1.conv.weight"], {name[7:]: a for name, a in state.items() if name.startswith("cv1.bn.")})
    mixed = {name: array for name, array in state.items() if not name.startswith("cv1.bn.")}
    mixed |= {"cv1.conv.weight": weight, "cv1.conv.bias": bias}
    np.testing.assert_allclose(nn.C2PSA.from_state_dict(mixed)(x, "oracle"), expected, rtol=1e-6)


# ---- sizes and names --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("units", [1, 2, 11])
@pytest.mark.parametrize("layer", [nn.C2PSA, nn.C3k2])
def test_the_number_of_blocks_is_what_the_names_say(layer, units):
    assert len(layer.from_state_dict(state_of(layer, units)).attentions) == units


def test_heads():
    sizes = {"c": 256, "qkv": 512, "c_in": 512}
    state = random_state(nn.C2PSA, sizes)
    default = nn.C2PSA.from_state_dict(state).attentions[0]
    assert (default.num_heads, default.key_dim, default.head_dim) == (4, 32, 64)
    other = nn.C2PSA.from_state_dict(state, num_heads=2).attentions[0]
    assert (other.num_heads, other.key_dim, other.head_dim) == (2, 64, 128)
    text = message(ShapeError, nn.C2PSA.from_state_dict, state, num_heads=3)
    assert "num_heads = 3 does not fit 256 channels and 512 of qkv" in text
    assert "1, 2, 4, 8, 16, 32, 64, 128 would fit" in text
    message(ShapeError, nn.C2PSA.from_state_dict, state, num_heads=0)
    message(TypeError, nn.C2PSA.from_state_dict, state, num_heads=2.0)
    general = nn.Attention.from_state_dict(random_state(nn.Attention, {"c": 260, "qkv": 516}))
    assert (general.num_heads, general.key_dim, general.head_dim) == (4, 32, 65)


def test_everything_wrong_is_listed_at_once():
    state = state_of()
    del state["m.0.ffn.1.conv.weight"]
    del state["m.0.attn.pe.bn.running_var"]
    state["cv1.conv.weight"] = normal(25, 17, 1, 1)
    state["cv2.conv.weight"] = normal(17, 24, 1)
    state["m.0.ffn.0.conv.weight"] = state["m.0.ffn.0.conv.weight"].astype(np.int8)
    state["m.0.attn.proj.bn.bias"] = np.full(12, np.nan, np.float32)
    state["m.0.attn.qkv.bn.running_var"] = -np.ones(24, np.float32)
    state["m.0.attn.kv.conv.weight"] = normal(2)
    state["cv1.conv.bias"] = normal(24)
    lines = set(message(WeightsError, nn.C2PSA.from_state_dict, state).splitlines()[1:])
    assert lines == {
        "  cv1.conv.weight: has shape [25, 17, 1, 1], must be [24, 17, 1, 1]",
        "  cv2.conv.weight: has shape [17, 24, 1], must be [17, 24, 1, 1]",
        "  m.0.ffn.0.conv.weight: has dtype int8, must be float16, bfloat16, float32 or float64",
        "  m.0.ffn.1.conv.weight [12, 24, 1, 1]: missing",
        "  m.0.attn.pe.bn.running_var [12]: missing",
        "  m.0.attn.proj.bn.bias: holds NaN or inf",
        "  m.0.attn.qkv.bn.running_var: holds negative variances",
        "  m.0.attn.kv.conv.weight: unexpected",
        "  cv1.conv.bias: unexpected",
    }


def test_a_missing_bias_says_what_would_do():
    state = state_of(folded=True)
    del state["cv1.conv.bias"]
    assert "cv1.conv.bias (or cv1.bn.*) [24]: missing" in message(WeightsError, nn.C2PSA.from_state_dict, state)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_single_weight_is_needed_and_checked(layer):
    state = state_of(layer)
    for name in state:
        if name.endswith("num_batches_tracked"):
            continue
        without = {other: array for other, array in state.items() if other != name}
        assert name in message(NumbaPSAError, layer.from_state_dict, without), name
        grown = np.concatenate((state[name], state[name][:1]))
        assert name in message(NumbaPSAError, layer.from_state_dict, {**state, name: grown}), name


def test_the_wrong_layer_and_the_wrong_prefix():
    state = state_of(prefix="model.10.")
    assert "no array has a name below 'model.9'; there are model.10" in message(
        WeightsError, nn.C2PSA.from_state_dict, state, "model.9"
    )
    text = message(WeightsError, nn.PSA.from_state_dict, state, "model.10")
    assert "attn.qkv.conv.weight" in text
    assert "m.0.attn.qkv.conv.weight: unexpected" in text
    message(WeightsError, nn.C2PSA.from_state_dict, {}, "")
    message(WeightsError, nn.C2PSA.from_state_dict, {"cv1.conv.weight": np.zeros((0, 0, 1, 1), np.float32)})


def test_attention_layers_are_found():
    state = {}
    layers = {"model.4": nn.C3k2, "model.10": nn.C2PSA, "a": nn.PSA, "b.c": nn.PSABlock, "": nn.Attention}
    for prefix, layer in layers.items():
        state |= state_of(layer, 2, f"{prefix}." if prefix else "")
    assert attention_layers(state) == layers
    assert layer_class(state, "model.10.m.1") is nn.PSABlock
    assert layer_class(state, "model.4.m.1.1.attn.") is nn.Attention
    assert "model.4 (C3k2), model.10 (C2PSA)" in message(WeightsError, layer_class, state, "model.1")


def test_a_layer_keeps_no_view_of_the_state():
    state, x = state_of(folded=True), normal(1, 17, 3, 4)
    layer = nn.C2PSA.from_state_dict(state)
    y = layer(x)
    for array in state.values():
        array[...] = 0
    np.testing.assert_array_equal(layer(x), y)
