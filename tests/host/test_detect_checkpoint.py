"""Checkpoints: what torch.save wrote is read exactly, and nothing that a pickle asks for is run."""

import os
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import Storage, Tensor, archive, module, save, tensor
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from numba_psa.cli import app
from numba_psa.errors import WeightsError
from numba_psa.nn.checkpoint import convert, read_checkpoint
from numba_psa.nn.files import read_state

RNG = np.random.default_rng(0)
YOLO11N = Path(__file__).parents[2] / ".models" / "yolo11n.pt"


def conv(c_out=4, c_in=3, dtype=np.float16, act="torch.nn.modules.activation.SiLU", eps=1e-3):
    """An Ultralytics Conv: convolution, batch norm, activation; and its arrays."""
    weight = RNG.standard_normal((c_out, c_in, 1, 1)).astype(dtype)
    norm = {name: RNG.standard_normal(c_out).astype(dtype) for name in ("weight", "bias", "running_mean", "running_var")}
    counter = np.array(7)
    arrays = {
        "conv.weight": weight,
        **{f"bn.{name}": array for name, array in norm.items()},
        "bn.num_batches_tracked": counter,
    }
    buffers = {name: tensor(norm[name]) for name in ("running_mean", "running_var")}
    buffers["num_batches_tracked"] = tensor(counter)
    batch_norm = module(
        "torch.nn.modules.batchnorm.BatchNorm2d",
        {"weight": tensor(norm["weight"]), "bias": tensor(norm["bias"])},
        buffers,
        eps=eps,
    )
    convolution = module("torch.nn.modules.conv.Conv2d", {"weight": tensor(weight), "bias": None}, stride=(2, 2))
    parts = {"conv": convolution, "bn": batch_norm, "act": module(act)}
    return module("ultralytics.nn.modules.conv.Conv", modules=parts), arrays


def model(act="torch.nn.modules.activation.SiLU", **options):
    """A DetectionModel with one layer, model.9.cv1, and its arrays."""
    cv1, arrays = conv(**options)
    sppf = module("ultralytics.nn.modules.block.SPPF", modules={"cv1": cv1})
    cv1._modules["act"] = module(act)
    sequence = module("torch.nn.modules.container.Sequential", modules={"9": sppf})
    attributes = {"names": {0: "cat", 1: "дог"}, "stride": tensor(np.array([8, 16, 32.0], np.float32))}
    attributes["args"] = {"task": "detect", "imgsz": 640, "path": None}
    whole = module("ultralytics.nn.tasks.DetectionModel", modules={"model": sequence}, **attributes)
    return whole, {f"model.9.cv1.{name}": array for name, array in arrays.items()}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(found[name], array)


def refused(path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_checkpoint(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


# ---- what is read -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", ["model", "ema"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_model_gives_its_state_dict(tmp_path, key, dtype):
    other, _ = model()
    whole, arrays = model(dtype=dtype)
    loaded = {"date": "2026-06-07", "model": other, "ema": None, "optimizer": None, key: whole}
    state, metadata = read_checkpoint(save(loaded, tmp_path / "best.pt"))
    assert_same(state, arrays)
    assert metadata == {
        "date": "2026-06-07",
        "names": repr({0: "cat", 1: "дог"}),
        "stride": "32",
        "task": "detect",
        "imgsz": "640",
        "sppf_silu": "true",
    }


def test_what_is_converted_reads_the_same(tmp_path):
    whole, arrays = model()
    count, metadata = convert(save({"model": whole}, tmp_path / "best.pt"), tmp_path / "best.safetensors")
    assert count == len(arrays)
    assert_same(
        dict(sorted(safetensors.numpy.load_file(tmp_path / "best.safetensors").items())), dict(sorted(arrays.items()))
    )
    with safetensors.safe_open(tmp_path / "best.safetensors", "numpy") as file:
        assert file.metadata() == metadata
    state = read_state(tmp_path / "best.safetensors")
    np.testing.assert_array_equal(state["model.9.cv1.conv.weight"], arrays["model.9.cv1.conv.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "best.safetensors"]


def test_bfloat16_is_kept(tmp_path):
    array = RNG.standard_normal((2, 3)).astype(ml_dtypes.bfloat16)
    state = OrderedDict({"w": Tensor(Storage(array.view(np.uint16), "BFloat16Storage"), (2, 3), (3, 1))})
    convert(save(state, tmp_path / "w.pt"), tmp_path / "w.safetensors")
    found = read_state(tmp_path / "w.safetensors")["w"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), array.view(np.uint16))


@given(st.data())
def test_views_of_a_storage_are_what_strides_say(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    step, first = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    whole = np.arange(first + step * int(np.prod(shape)), dtype=np.float32)
    expected = whole[first::step].reshape(shape).transpose(order)
    strides = tuple(stride // 4 for stride in expected.strides) if expected.size else (1,) * len(shape)
    state = {"x": Tensor(whole, expected.shape, strides, first)}
    path = save(state, Path(os.environ.get("TMPDIR", "/tmp")) / f"views-{os.getpid()}.pt")
    try:
        assert_same(read_checkpoint(path)[0], {"x": expected})
    finally:
        path.unlink()


def test_what_a_state_dict_leaves_out_is_left_out(tmp_path):
    weight = np.zeros(3, np.float32)
    parts = {"kept": tensor(weight), "scratch": tensor(weight), "none": None}
    whole = module("a.Net", buffers=parts, transient=["scratch"], modules={"none": None})
    assert list(read_checkpoint(save(whole, tmp_path / "m.pt"))[0]) == ["kept"]


@pytest.mark.skipif(not YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")
def test_the_trained_yolo11n():
    state, metadata = read_checkpoint(YOLO11N)
    assert len(state) == 499
    assert metadata["names"] == "{0: 'item'}"
    assert (metadata["stride"], metadata["task"], metadata["sppf_silu"]) == ("32", "detect", "false")
    assert state["model.0.conv.weight"].shape == (16, 3, 3, 3)
    assert all(np.isfinite(array.astype(np.float64)).all() for array in state.values())


# ---- what a state dict does not show ----------------------------------------------------------------------------------
def test_other_activations_and_eps_are_refused_by_name(tmp_path):
    whole, _ = model(act="torch.nn.modules.activation.ReLU")
    assert "model.9.cv1.act is a torch.nn.modules.activation.ReLU" in refused(save({"model": whole}, tmp_path / "relu.pt"))
    whole, _ = model(eps=1e-5)
    assert "model.9.cv1.bn has eps = 1e-05" in refused(save({"model": whole}, tmp_path / "eps.pt"))
    whole, _ = model(act="torch.nn.modules.linear.Identity")
    assert read_checkpoint(save({"model": whole}, tmp_path / "identity.pt"))[1]["sppf_silu"] == "false"


# ---- hostile pickles --------------------------------------------------------------------------------------------------
class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def touch(path):
    """A command that leaves a trace."""
    return f"touch {path}"


def raw(*parts) -> bytes:
    """A pickle of opcodes: strings are names to import, bytes stand as they are."""
    return b"".join(part if isinstance(part, bytes) else f"c{part.replace(' ', chr(10))}\n".encode() for part in parts)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def hostile(trace) -> dict[str, tuple[bytes, str]]:
    """{kind: (pickle, what the message names)}; each, loaded by pickle.load, would leave a trace or has a way to try."""
    command, code = text(touch(trace)), text(f"open({str(trace)!r}, 'w')")
    return {
        "reduce": (pickle.dumps(Calls(os.system, touch(trace)), 2), "calls posix.system"),
        "reduce, newer": (pickle.dumps({"model": Calls(os.system, touch(trace))}, 5), "calls posix.system"),
        "eval": (pickle.dumps(Calls(eval, f"open({str(trace)!r}, 'w')"), 4), "calls builtins.eval"),
        "exec": (raw(b"\x80\x02", "__builtin__ exec", code, b"\x85R."), "calls __builtin__.exec"),
        "getattr": (raw(b"\x80\x02", "builtins getattr", "os path", text("join"), b"\x86R."), "calls builtins.getattr"),
        "inst": (b"(" + command + b"ios\nsystem\n.", "calls os.system"),
        "obj": (raw(b"(", "os system", command, b"o."), "calls os.system"),
        "name with dots": (
            b"\x80\x04" + text("os") + text("path.os.system") + b"\x93" + command + b"\x85R.",
            "os.path.os.system",
        ),
        "popen as a class": (raw(b"\x80\x02", "subprocess Popen", command, b"\x85R."), "calls subprocess.Popen"),
        "instance made, never called": (raw(b"\x80\x02", "subprocess Popen", command, b"\x85\x81."), "a subprocess.Popen"),
        "torch.load within": (raw(b"\x80\x02", "torch.storage _load_from_bytes", b"C\x01x\x85R."), "_load_from_bytes"),
        "build calls setstate": (raw(b"\x80\x02", "os system", command, b"b."), "damaged"),
        "build sets an attribute of a call": (
            raw(b"\x80\x02", "torch._utils _rebuild_tensor_v2", b"N}", text("x"), "os system", b"s\x86b."),
            "damaged",
        ),
        "append to an object": (
            raw(b"\x80\x02", "a B", b")\x81}", text("append"), "os system", b"sb", command, b"a."),
            "damaged",
        ),
        "items of an object": (raw(b"\x80\x02", "a B", b")\x81", command, command, b"s."), "damaged"),
        "call of a call": (raw(b"\x80\x02", "collections OrderedDict", b")R)R."), "damaged"),
        "extension": (b"\x80\x02\x82\x01.", "damaged"),
        "persistent id": (raw(b"\x80\x02", command, b"Q."), "refers to"),
        "storage of another kind": (
            raw(b"\x80\x02(", text("storage"), "os system", text("0"), text("cpu"), b"K\x01tQ."),
            "refers to 'os.system'",
        ),
        "place of a value": (raw(b"\x80\x02}r\xff\xff\xff\x7f."), "damaged"),
        "nothing": (b"", "damaged"),
        "no end": (b"\x80\x02}", "damaged"),
        "a number": (b"\x80\x02K\x01.", "no model"),
        "an empty dict": (b"\x80\x02}.", "no model"),
        "a set of sets": (raw(b"\x80\x02", "builtins set", b"](", "builtins set", b"]\x85Re\x85R."), "no model"),
    }


@pytest.mark.parametrize("kind", hostile("x"))
def test_nothing_in_a_pickle_is_run(tmp_path, kind):
    trace = tmp_path / "trace"
    program, named = hostile(trace)[kind]
    assert named in refused(archive(tmp_path / "best.pt", program))
    assert not trace.exists()


def test_the_hostile_pickles_are_hostile(tmp_path):
    """Python's own unpickler runs them: the tests above would see it."""
    for kind in ("reduce", "eval", "exec", "inst", "obj", "name with dots"):
        trace = tmp_path / kind.replace(" ", "_")
        pickle.loads(hostile(trace)[kind][0])
        assert trace.exists(), kind


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
@given(st.data())
def test_damage_is_an_error_that_names_the_file(data):
    """Bytes of a good pickle changed, cut off, or put in: read as something, or one WeightsError; never anything else."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"damage-{os.getpid()}.pt"
    save({"model": model()[0]}, path)
    with zipfile.ZipFile(path) as file:
        program = bytearray(file.read("best/data.pkl"))
        storages = [file.read(name) for name in file.namelist() if "/data/" in name]
    codes = st.sampled_from([op.code.encode("latin1") for op in pickletools.opcodes]) | st.binary(min_size=1, max_size=4)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(program) - 1))
        new = data.draw(codes)
        program[at : at + data.draw(st.integers(0, 4))] = new
    try:
        read_checkpoint(archive(path, bytes(program), storages))
    except WeightsError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - it may also be read
    finally:
        path.unlink()


# ---- files that are none, tensors that are none -------------------------------------------------------------------------
VIEWS = {
    "beyond the end": ((3, 4), (4, 1), 1),
    "far beyond": ((2,), (2**62,), 0),
    "more than there is": ((2**40,), (0,), 0),
    "negative": ((3,), (-1,), 3),
    "negative size": ((-1, 4), (4, 1), 0),
    "another rank": ((3, 4), (1,), 0),
    "no numbers": (("3",), (1,), 0),
    "a bool": ((True,), (1,), 0),
    "many axes": ((1,) * 40, (1,) * 40, 0),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_outside_a_storage_are_refused(tmp_path, kind):
    shape, strides, first = VIEWS[kind]
    refused(save({"x": Tensor(np.zeros(12, np.float32), shape, strides, first)}, tmp_path / "w.pt"))


def test_storages_are_checked(tmp_path):
    assert "QInt8Storage" in refused(
        save({"x": Tensor(Storage(np.zeros(4), "QInt8Storage"), (4,), (1,))}, tmp_path / "q.pt")
    )
    path = save({"x": tensor(np.zeros(4))}, tmp_path / "w.pt")
    with zipfile.ZipFile(path) as file:
        program = file.read("best/data.pkl")
    assert "no best/data/0" in refused(archive(path, program))
    assert "too few for 4 elements" in refused(archive(path, program, [b"\0" * 31]))
    assert "compressed" in refused(archive(path, program, [b"\0" * 32], compression=zipfile.ZIP_DEFLATED))
    assert "constants.pkl" in refused(archive(path, program, [b"\0" * 32], constants=b""))


def test_a_swollen_file_is_refused(tmp_path):
    storage = Storage(np.zeros(1000))
    state = {f"x{i}": Tensor(storage, (1000,), (1,)) for i in range(1000)}
    assert "share storages" in refused(save(state, tmp_path / "w.pt"))
    loop = module("a.Loop", {"w": tensor(np.zeros(1))})
    loop._modules["self"] = loop
    assert "inside each other" in refused(save(loop, tmp_path / "loop.pt"))
    doubled = module("a.Leaf", {"w": tensor(np.zeros(1))})
    for _ in range(40):
        doubled = module("a.Pair", modules={"a": doubled, "b": doubled})
    assert "100000 modules" in refused(save(doubled, tmp_path / "pair.pt"))


ODD = {
    "eps": np.zeros(3),
    "_modules": np.zeros(3),
    "_parameters": [1],
    "_buffers": {"x": 3},
    "_non_persistent_buffers_set": 5,
    "stride": np.array([np.inf]),
    "names": [["x"] * 9],
    "args": np.zeros(2),
}


NOT_LOOKED_AT = {"": {"eps", "_non_persistent_buffers_set", "args", "names"}, "model.9.cv1.bn": {"stride", "names", "args"}}
"""Where there are no buffers, no batch norm, not the model itself; and what is left out of the metadata if it is odd."""


@pytest.mark.parametrize("place", NOT_LOOKED_AT)
@pytest.mark.parametrize("attribute", ODD)
def test_models_that_are_none_are_refused_or_read(tmp_path, place, attribute):
    whole, arrays = model()
    found = whole
    for name in filter(None, place.split(".")):
        found = found._modules[name]
    value = ODD[attribute]
    found.__dict__[attribute] = tensor(value) if isinstance(value, np.ndarray) else value
    path = save({"model": whole}, tmp_path / "best.pt")
    if attribute in NOT_LOOKED_AT[place]:
        assert_same(read_checkpoint(path)[0], arrays)
    else:
        refused(path)


def test_what_nests_without_end_is_not_spelt_out(tmp_path):
    bomb = "x"
    for _ in range(60):
        bomb = (bomb, bomb)
    whole, _ = model(eps=bomb)
    assert len(refused(save({"model": whole}, tmp_path / "eps.pt"))) < 1000
    assert len(refused(save({"x": Tensor(np.zeros(3), bomb, (1,))}, tmp_path / "shape.pt"))) < 1000


@pytest.mark.parametrize("content", [b"", b"\0", b"PK\x03\x04rubbish", b"\x80\x02}."], ids=repr)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "best.pt").write_bytes(content)
    assert "no checkpoint of PyTorch" in refused(tmp_path / "best.pt")


def test_a_cut_file_is_refused(tmp_path):
    content = save({"model": model()[0]}, tmp_path / "best.pt").read_bytes()
    for cut in range(0, len(content), max(len(content) // 40, 1)):
        (tmp_path / "cut.pt").write_bytes(content[:cut])
        refused(tmp_path / "cut.pt")


# ---- the command ------------------------------------------------------------------------------------------------------
def test_the_command(tmp_path):
    whole, arrays = model()
    save({"model": whole}, tmp_path / "best one.pt")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "best one.pt")])
    assert result.exit_code == 0, result.output
    assert f"{len(arrays)} arrays" in result.stdout
    assert sorted(read_state(tmp_path / "best one.safetensors")) == sorted(arrays)
    before = (tmp_path / "best one.safetensors").read_bytes()
    archive(tmp_path / "best one.pt", hostile(tmp_path / "trace")["reduce"][0])
    for arguments, message in (
        (["best one.pt"], "calls posix.system"),
        (["none.pt"], "No such file"),
        ([".", "--output", "w.safetensors"], "Is a directory"),
        (["best one.pt", "--output", "w.onnx"], "must end in .safetensors"),
    ):
        arguments = [part if part.startswith("--") else str(tmp_path / part) for part in arguments]
        result = CliRunner().invoke(app, ["convert", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "best one.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best one.pt", "best one.safetensors"]
