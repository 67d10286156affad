"""Checkpoints to test with: what `torch.save` writes, opcode by opcode, made without PyTorch."""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from functools import cache
from unittest import mock

import numpy as np

STORAGES = {"f2": "HalfStorage", "f4": "FloatStorage", "f8": "DoubleStorage", "i8": "LongStorage"}


@cache
def named(name):
    """A class of this full name; it stands for a function too, of which a pickle holds no more than the name."""
    module, _, last = name.rpartition(".")
    made = type(last, (), {"__module__": module, "__qualname__": last})
    MADE.append(made)
    return made


MADE: list[type] = []


class Storage:
    def __init__(self, array, name=None):
        self.array = np.ascontiguousarray(array).ravel()
        self.kind = named(f"torch.{name or STORAGES[array.dtype.str[1:]]}")


class Tensor:
    """A view of a storage, as `_rebuild_tensor_v2` makes it; a parameter or not."""

    def __init__(self, storage, shape, strides, first=0, parameter=False):
        self.storage = storage if isinstance(storage, Storage) else Storage(storage)
        self.shape, self.strides, self.first, self.parameter = shape, strides, first, parameter


def tensor(array, parameter=False):
    """The whole of an array."""
    strides = tuple(stride // array.itemsize for stride in np.ascontiguousarray(array).reshape(array.shape).strides)
    return Tensor(array, array.shape, strides, parameter=parameter)


def module(kind, parameters=(), buffers=(), modules=(), transient=(), **attributes):
    """An object of the class `kind`, such as `torch.nn.modules.conv.Conv2d`."""
    made = named(kind)()
    parameters = {name: value and Tensor(**(vars(value) | {"parameter": True})) for name, value in dict(parameters).items()}
    made.__dict__ = {"training": False, "_parameters": parameters, "_buffers": OrderedDict(buffers)}
    made.__dict__ |= {"_modules": dict(modules), "_non_persistent_buffers_set": set(transient), **attributes}
    return made


class _Pickler(pickle.Pickler):
    def __init__(self, file, storages):
        super().__init__(file, protocol=2)
        self.storages = storages

    def persistent_id(self, thing):
        if not isinstance(thing, Storage):
            return None
        if thing not in self.storages:
            self.storages.append(thing)
        return "storage", thing.kind, str(self.storages.index(thing)), "cpu", thing.array.size

    def reducer_override(self, thing):
        if not isinstance(thing, Tensor):
            return NotImplemented
        if thing.parameter:
            bare = Tensor(**(vars(thing) | {"parameter": False}))
            return named("torch._utils._rebuild_parameter"), (bare, True, OrderedDict())
        view = thing.storage, thing.first, thing.shape, thing.strides, False, OrderedDict()
        return named("torch._utils._rebuild_tensor_v2"), view


def _modules():
    """The modules that the pickler looks names up in."""
    found = {}
    for made in MADE:
        parts = made.__module__.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        setattr(found[made.__module__], made.__name__, made)
    return found


def archive(path, program, storages=(), compression=zipfile.ZIP_STORED, **entries):
    """A checkpoint file around a pickle and the bytes of storages."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("best/data.pkl", program)
        file.writestr("best/byteorder", "little")
        for key, content in enumerate(storages):
            file.writestr(f"best/data/{key}", content)
        for name, content in entries.items():
            file.writestr(f"best/{name}.pkl", content)
    return path


def save(thing, path):
    """torch.save(thing, path)."""
    for call in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        named(f"torch._utils.{call}")
    content, storages = io.BytesIO(), []
    with mock.patch.dict(sys.modules, _modules()):
        _Pickler(content, storages).dump(thing)
    return archive(path, content.getvalue(), [storage.array.tobytes() for storage in storages])
