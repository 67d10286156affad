"""Vectors of the host's width as values in Numba code: load, store, broadcast, fma, maximum, exp2, and rows of vectors.

    x = load(p, i)                      # LANES consecutive elements from p + i
    store(p, i, fma(x, y, z))           # x*y + z; + - * / as operators
    rows = zero_rows(p, ROWS)           # a tuple of ROWS vectors, which stay in registers
    rows = fma_rows(rows, a, i, s, x)   # rows[r] += a[i + r*s] * x

`p` and `a` are pointers, `CPointer(float32)` or `CPointer(float64)`; their element type decides everything else.
LLVM gets vector types of the width of the CPU that Numba compiles for, so one source serves AVX-512, AVX2, NEON and SSE.
Everything here is compiled code only: each name is an intrinsic, called from `njit` functions.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
VECTOR_BYTES = 64 if "+avx512f" in _FEATURES else 32 if {"+avx2", "+fma"} <= set(_FEATURES) else 16
"""Bytes of a vector register: 64 AVX-512, 32 AVX2, 16 NEON and SSE."""
ROWS = 16 if "+avx512f" in _FEATURES or "+neon" in _FEATURES else 12
"""Vectors of a full tile: three quarters of the register file at most, the rest is for operands."""

# 2**f = polynomial(f) on [-1/2, 1/2], minimax in the relative error (Remez): 1.9e-9, 3.1e-18 before rounding.
_EXP2_FLOAT = (
    1.0,
    0.6931471824645996,
    0.24022646248340607,
    0.05550328642129898,
    0.009618489071726799,
    0.0013399930903688073,
    0.0001534581242594868,
)
_EXP2_DOUBLE = (
    1.0,
    0.6931471805599453,
    0.24022650695910155,
    0.055504108664819925,
    0.009618129107588335,
    0.001333355814678995,
    0.00015403530462514614,
    1.5252733489960805e-05,
    1.321543308959463e-06,
    1.0178198033328528e-07,
    7.074105626245659e-09,
    4.4352809446103363e-10,
)
# (polynomial, exponent bias, mantissa bits) by element type
_EXP2 = {types.float32: (_EXP2_FLOAT, 127, 23), types.float64: (_EXP2_DOUBLE, 1023, 52)}
_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    """The Numba type of one vector register of `dtype`; of unsigned integers only to be moved, at most 16 of them."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.lanes = min(VECTOR_BYTES * 8 // dtype.bitwidth, 16)
        super().__init__(name=f"Vector({dtype} x {self.lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        floats = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
        return ir.VectorType(floats.get(self.dtype) or ir.IntType(self.dtype.bitwidth), self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


# ---- the code each building block becomes -----------------------------------------------------------------------------
def _constant(vector: Vector, value: float):
    return ir.Constant(vector.llvm, [value] * vector.lanes)


def _splat(builder, scalar, lanes: int):
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _load(builder, vector: Vector, pointer, index):
    address = builder.bitcast(builder.gep(pointer, [index]), vector.llvm.as_pointer())
    return builder.load(address, align=vector.dtype.bitwidth // 8)


def _store(builder, vector: Vector, pointer, index, value):
    address = builder.bitcast(builder.gep(pointer, [index]), vector.llvm.as_pointer())
    builder.store(value, address, align=vector.dtype.bitwidth // 8)


def _broadcast(builder, vector: Vector, pointer, index):
    return _splat(builder, builder.load(builder.gep(pointer, [index])), vector.lanes)


def _fma(builder, vector: Vector, a, b, c):
    # fmuladd, not fma: a CPU without the instruction multiplies and adds instead of calling a library.
    name = f"llvm.fmuladd.v{vector.lanes}f{vector.dtype.bitwidth}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector.llvm, [vector.llvm] * 3), name)
    return builder.call(function, [a, b, c])


def _maximum(builder, vector: Vector, a, b):
    """a > b ? a : b, so b where either is NaN: one instruction on x86."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp2(builder, vector: Vector, x):
    """2**x: 0 below the smallest normal number, inf where it overflows, NaN for NaN. 2**x = 2**n · 2**f, |f| ≤ 1/2."""
    polynomial, bias, mantissa = _EXP2[vector.dtype]
    integers = ir.VectorType(ir.IntType(vector.dtype.bitwidth), vector.lanes)
    x = _maximum(builder, vector, _constant(vector, -bias), x)
    x = builder.select(builder.fcmp_ordered("<", _constant(vector, bias + 1), x), _constant(vector, bias + 1), x)
    # Adding 1.5·2**mantissa leaves the nearest integer n in the low bits, and with the bias they are the exponent of 2**n.
    magic = _constant(vector, 1.5 * 2.0**mantissa + bias)
    shifted = builder.fadd(x, magic)
    f = builder.fsub(x, builder.fsub(shifted, magic))
    power = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [mantissa] * vector.lanes))
    result = _constant(vector, polynomial[-1])
    for coefficient in reversed(polynomial[:-1]):
        result = _fma(builder, vector, result, f, _constant(vector, coefficient))
    return builder.fmul(result, builder.bitcast(power, vector.llvm))


def _tree(values, combine):
    """Pairwise: shorter chains and smaller rounding errors than from left to right."""
    while len(values) > 1:
        values = [combine(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


# ---- building blocks --------------------------------------------------------------------------------------------------
@intrinsic
def pointer(_typing, address, like):
    """Pointer of the type of `like` to the integer `address`."""

    def generate(context, builder, sig, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(sig.return_type))

    return like(types.uintp, like), generate


@intrinsic
def keep(_typing, array):
    """Does nothing, but the array lives until here: a pointer into it does not keep it."""
    return types.void(array), lambda context, builder, sig, arguments: context.get_dummy_value()


@intrinsic
def advance(_typing, p, count):
    """p + count elements."""
    return p(p, types.intp), lambda context, builder, sig, arguments: builder.gep(arguments[0], [arguments[1]])


@intrinsic
def lanes(_typing, p):
    """LANES, elements of p's type in one vector: a compile-time constant."""
    count = Vector(p.dtype).lanes
    return types.intp(p), lambda context, builder, sig, arguments: _I64(count)


@intrinsic
def load(_typing, p, index):
    """The vector p[index : index + LANES]."""
    vector = Vector(p.dtype)
    return vector(p, types.intp), lambda context, builder, sig, arguments: _load(builder, vector, *arguments)


@intrinsic
def store(_typing, p, index, x):
    """p[index : index + LANES] = x."""

    def generate(context, builder, sig, arguments):
        _store(builder, x, *arguments)
        return context.get_dummy_value()

    return types.void(p, types.intp, x), generate


@intrinsic(prefer_literal=True)
def prefetch(_typing, p, index, write):
    """Bring the line of p[index] near, to be read (write 0) or written (1): changes nothing but time."""

    def generate(context, builder, sig, arguments):
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [address.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        builder.call(function, [address, _I32(write.literal_value), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(p, types.intp, write), generate


@intrinsic
def splat(_typing, p, scalar):
    """The vector of p's element type with the float64 `scalar`, converted, in each lane."""
    vector = Vector(p.dtype)

    def generate(context, builder, sig, arguments):
        return _splat(builder, context.cast(builder, arguments[1], types.float64, p.dtype), vector.lanes)

    return vector(p, types.float64), generate


@intrinsic
def fma(_typing, a, b, c):
    """a*b + c."""
    return a(a, a, a), lambda context, builder, sig, arguments: _fma(builder, a, *arguments)


@intrinsic
def maximum(_typing, a, b):
    """a where a > b, else b: b also where either is NaN."""
    return a(a, a), lambda context, builder, sig, arguments: _maximum(builder, a, *arguments)


@intrinsic
def exp2(_typing, x):
    """2**x, within 1 ulp; subnormal results are 0."""
    return x(x), lambda context, builder, sig, arguments: _exp2(builder, x, *arguments)


@intrinsic
def where_greater(_typing, a, b, x):
    """x in lanes where a > b or a is NaN, 0 elsewhere, whatever x is there."""

    def generate(context, builder, sig, arguments):
        a_value, b_value, x_value = arguments
        return builder.select(builder.fcmp_unordered(">", a_value, b_value), x_value, _constant(a, 0.0))

    return x(a, a, x), generate


def _every_other(vector: Vector, first: int):
    mask = ir.Constant(ir.VectorType(_I32, vector.lanes), list(range(first, 2 * vector.lanes, 2)))
    return vector(vector, vector), lambda context, builder, sig, arguments: builder.shuffle_vector(*arguments, mask)


@intrinsic
def even_lanes(_typing, a, b):
    """Lanes 0, 2, 4, … of a followed by b."""
    return _every_other(a, 0)


@intrinsic
def odd_lanes(_typing, a, b):
    """Lanes 1, 3, 5, … of a followed by b."""
    return _every_other(a, 1)


def _define_operator(function, emit):
    @infer_global(function)
    class _Typing(AbstractTemplate):
        def generic(self, arguments, keywords):
            if len(arguments) == 2 and isinstance(arguments[0], Vector) and arguments[0] == arguments[1]:
                return signature(arguments[0], *arguments)
            return None

    @lower_builtin(function, Vector, Vector)
    def _lower(context, builder, sig, arguments):
        return emit(builder, *arguments)


_define_operator(operator.add, ir.IRBuilder.fadd)
_define_operator(operator.sub, ir.IRBuilder.fsub)
_define_operator(operator.mul, ir.IRBuilder.fmul)
_define_operator(operator.truediv, ir.IRBuilder.fdiv)


# ---- rows: a tuple of vectors, one for each row of a tile --------------------------------------------------------------
def _unpack(builder, rows, value):
    return [builder.extract_value(value, r) for r in range(rows.count)]


def _pack(builder, rows, values):
    result = ir.Constant(ir.ArrayType(rows.dtype.llvm, rows.count), ir.Undefined)
    for r, value in enumerate(values):
        result = builder.insert_value(result, value, r)
    return result


def _row_index(builder, index, stride, r):
    return builder.add(index, builder.mul(stride, _I64(r)))


@intrinsic(prefer_literal=True)
def zero_rows(_typing, p, count):
    """`count` (a literal) vectors of zeros, of the element type of p."""
    rows = types.UniTuple(Vector(p.dtype), count.literal_value)

    def generate(context, builder, sig, arguments):
        return _pack(builder, rows, [_constant(rows.dtype, 0.0)] * rows.count)

    return rows(p, count), generate


@intrinsic
def square_rows(_typing, p):
    """As many vectors of zeros as one has lanes."""
    rows = types.UniTuple(Vector(p.dtype), Vector(p.dtype).lanes)
    return rows(p), lambda context, builder, sig, arguments: ir.Constant(context.get_value_type(rows), None)


@intrinsic
def load_rows(_typing, p, index, stride, like):
    """As many vectors as `like` has, row r = load(p, index + r*stride)."""

    def generate(context, builder, sig, arguments):
        base, index, stride, _ = arguments
        loaded = [_load(builder, like.dtype, base, _row_index(builder, index, stride, r)) for r in range(like.count)]
        return _pack(builder, like, loaded)

    return like(p, types.intp, types.intp, like), generate


@intrinsic
def broadcast_rows(_typing, p, index, stride, like):
    """As many vectors as `like` has, row r = broadcast(p, index + r*stride)."""

    def generate(context, builder, sig, arguments):
        base, index, stride, _ = arguments
        loaded = [_broadcast(builder, like.dtype, base, _row_index(builder, index, stride, r)) for r in range(like.count)]
        return _pack(builder, like, loaded)

    return like(p, types.intp, types.intp, like), generate


@intrinsic
def store_rows(_typing, p, index, stride, rows):
    """store(p, index + r*stride, row r)."""

    def generate(context, builder, sig, arguments):
        base, index, stride, value = arguments
        for r, row in enumerate(_unpack(builder, rows, value)):
            _store(builder, rows.dtype, base, _row_index(builder, index, stride, r), row)
        return context.get_dummy_value()

    return types.void(p, types.intp, types.intp, rows), generate


@intrinsic
def transpose_rows(_typing, rows):
    """Row c of the result holds lane c of each of `square_rows`: log2(LANES) steps that exchange blocks of half the size."""
    size = rows.count

    def generate(context, builder, sig, arguments):
        values, block = _unpack(builder, rows, arguments[0]), 1
        while block < size:
            for i in (i for i in range(size) if not i & block):
                upper, lower = values[i], values[i + block]
                first = [size + j - block if j & block else j for j in range(size)]
                second = [size + j if j & block else j + block for j in range(size)]
                masks = (ir.Constant(ir.VectorType(_I32, size), mask) for mask in (first, second))
                values[i], values[i + block] = (builder.shuffle_vector(upper, lower, mask) for mask in masks)
            block *= 2
        return _pack(builder, rows, values)

    return rows(rows), generate


@intrinsic
def fma_rows(_typing, rows, a, index, stride, x):
    """rows[r] + a[index + r*stride] * x: the outer product that every matrix product here is made of."""

    def generate(context, builder, sig, arguments):
        value, base, index, stride, vector = arguments
        results = []
        for r, row in enumerate(_unpack(builder, rows, value)):
            factor = _broadcast(builder, rows.dtype, base, _row_index(builder, index, stride, r))
            results.append(_fma(builder, rows.dtype, factor, vector, row))
        return _pack(builder, rows, results)

    return rows(rows, a, types.intp, types.intp, x), generate


def _row_wise(name: str, doc: str, emit, operands: int):
    """An intrinsic that applies `emit` row by row; every operand after the first is rows or one vector for all of them."""

    def typed(rows, others):
        def generate(context, builder, sig, arguments):
            columns = [
                _unpack(builder, t, v) if t == rows else [v] * rows.count for t, v in zip(sig.args, arguments, strict=True)
            ]
            return _pack(builder, rows, [emit(builder, rows.dtype, *values) for values in zip(*columns, strict=True)])

        return rows(rows, *others), generate

    def one(_typing, rows):
        return typed(rows, ())

    def two(_typing, rows, b):
        return typed(rows, (b,))

    function = (one, two)[operands - 1]
    function.__name__, function.__doc__ = name, doc
    return intrinsic(function)


exp2_each = _row_wise("exp2_each", "exp2 of each row.", _exp2, 1)
subtract_each = _row_wise("subtract_each", "rows - b.", lambda builder, vector, a, b: builder.fsub(a, b), 2)
multiply_each = _row_wise("multiply_each", "rows * b.", lambda builder, vector, a, b: builder.fmul(a, b), 2)


@intrinsic
def max_of_rows(_typing, rows):
    """The largest of all rows, lane by lane."""

    def generate(context, builder, sig, arguments):
        return _tree(_unpack(builder, rows, arguments[0]), lambda a, b: _maximum(builder, rows.dtype, a, b))

    return rows.dtype(rows), generate


@intrinsic
def sum_of_rows(_typing, rows):
    """The sum of all rows, lane by lane."""
    return rows.dtype(rows), lambda context, builder, sig, arguments: _tree(
        _unpack(builder, rows, arguments[0]), builder.fadd
    )
