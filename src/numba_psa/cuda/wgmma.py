"""Warpgroup matrix products (sm_90a) on cuda.local.arrays. THE FENCED UGLY PART: read the docstrings, not the bodies.

wgmma is asynchronous and names up to 96 registers in one instruction, so no fixed-arity ptx_op can express it. These
intrinsics load an array's elements into asm operands and store them back; after optimisation nothing of that remains.
All extents are literal integers at the call: call them from the kernel, with closure variables, never through a step.
"""

from llvmlite import ir
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.extending import intrinsic

_F, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _constant(literal):
    """The value behind a literal type. Raising on other types makes Numba try again with literals."""
    if not isinstance(literal, types.IntegerLiteral):
        raise TypingError("extents of a warpgroup product must be constants of the kernel's closure")
    return literal.literal_value


def _load(context, builder, array_type, array, count, element):
    data = builder.bitcast(context.make_array(array_type)(context, builder, array).data, ir.PointerType(element))
    pointers = [builder.gep(data, [ir.Constant(_I32, i)]) for i in range(count)]
    return pointers, [builder.load(p) for p in pointers]


def _emit(builder, asm, outputs, inputs, tied):
    """asm with float outputs written back through the pointers `outputs`; the first `tied` inputs share their registers."""
    letters = {_F: "f", _I32: "r", _I64: "l"}
    constraints = (
        ["=f"] * len(outputs) + [str(i) for i in range(tied)] + [letters[v.type] for v in inputs[tied:]] + ["~{memory}"]
    )
    function = ir.FunctionType(ir.LiteralStructType([_F] * len(outputs)), [v.type for v in inputs])
    result = builder.call(
        ir.InlineAsm(function, asm, ",".join(constraints), side_effect=True), inputs, attrs=("convergent",)
    )
    for i, pointer in enumerate(outputs):
        builder.store(builder.extract_value(result, i), pointer)


_PREDICATES = "{ .reg .pred no, yes; .reg .b64 d; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;"


def _names(first, count):
    return "{" + ",".join(f"${first + i}" for i in range(count)) + "}"


def _product(n, first_a, steps, descriptor, offsets, kind, transposed, clear):
    """asm text: d[64 x n] (+)= sum over steps of a[64 x 16] b[16 x n], one committed group."""

    lines = [_PREDICATES, "wgmma.fence.sync.aligned;"]
    for i in range(steps):
        lines.append(
            f"add.s64 d, ${descriptor}, {offsets[i] // 16}; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
            f"{_names(0, n // 2)}, {_names(first_a + 4 * i, 4)}, d, {'no' if clear and i == 0 else 'yes'}, 1, 1, "
            f"{transposed};"
        )
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@intrinsic
def wgmma_scores(context, s, q, keys, block, key_dim, bf16):
    """Start s[64 x block] = q k^T: q in registers, keys the descriptor of [key_dim][64 keys] rows, 128-byte swizzle."""
    n, steps, kind = _constant(block), _constant(key_dim) // 16, "bf16" if _constant(bf16) else "f16"
    asm = _product(n, n // 2, steps, n // 2 + 4 * steps, [2048 * i for i in range(steps)], kind, 1, clear=True)

    def generate(context, builder, signature, v):
        outputs, _ = _load(context, builder, signature.args[0], v[0], n // 2, _F)
        _, a = _load(context, builder, signature.args[1], v[1], 4 * steps, _I32)
        _emit(builder, asm, outputs, [*a, v[2]], tied=0)
        return context.get_dummy_value()

    return types.void(s, q, types.uint64, block, key_dim, bf16), generate


@intrinsic
def wgmma_values(context, acc, p, values, value_dim, block, tile_bytes, bf16):
    """Start acc[64 x value_dim] += p v: p in registers, values the descriptor of [value_dim][64 keys] rows, swizzled.

    Blocks of 64 keys are tile_bytes apart.
    """
    n, steps, kind = _constant(value_dim), _constant(block) // 16, "bf16" if _constant(bf16) else "f16"
    offsets = [i // 4 * _constant(tile_bytes) + i % 4 * 32 for i in range(steps)]
    asm = _product(n, n, steps, n + 4 * steps, offsets, kind, 0, clear=False)

    def generate(context, builder, signature, v):
        outputs, c = _load(context, builder, signature.args[0], v[0], n // 2, _F)
        _, a = _load(context, builder, signature.args[1], v[1], 4 * steps, _I32)
        _emit(builder, asm, outputs, c + a + [v[2]], tied=n // 2)
        return context.get_dummy_value()

    return types.void(acc, p, types.uint64, value_dim, block, tile_bytes, bf16), generate


def _tf32_terms(n, i):
    """Where the i-th eight terms are, in 16 bytes: four of them in a row, then the next block of n rows."""
    return i // 4 * (128 * n // 16) + 2 * (i % 4)


@intrinsic
def wgmma_tf32(context, d, high, low, b_high, b_low, width, terms, exact):
    """Start d[64 x width] = a b over `terms` terms, a multiple of 8: a = high + low in registers, b likewise.

    b_high, b_low: descriptors of [width][32 terms] rows of 128 bytes, swizzled, a block after the other. exact: all three
    products that matter; else only high b_high.
    """
    n, steps, three = _constant(width), _constant(terms) // 8, _constant(exact)
    first_high, first_low = n // 2, n // 2 + 4 * steps
    descriptor = first_low + 4 * steps
    products = [(first_low, 0), (first_high, 1), (first_high, 0)] if three else [(first_high, 0)]
    lines = [_PREDICATES, "wgmma.fence.sync.aligned;"]
    clear = "no"
    for first, operand in products:
        for i in range(steps):
            lines.append(
                f"add.s64 d, ${descriptor + operand}, {_tf32_terms(n, i)}; "
                f"wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 "
                f"{_names(0, n // 2)}, {_names(first + 4 * i, 4)}, d, {clear}, 1, 1;"
            )
            clear = "yes"
    asm = " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    def generate(context, builder, signature, v):
        outputs, _ = _load(context, builder, signature.args[0], v[0], n // 2, _F)
        _, a_high = _load(context, builder, signature.args[1], v[1], 4 * steps, _I32)
        # Without exact nobody writes low; the operand is named all the same, so that operands have fixed numbers.
        a_low = _load(context, builder, signature.args[2], v[2], 4 * steps, _I32)[1] if three else a_high
        _emit(builder, asm, outputs, [*a_high, *a_low, v[3], v[4]], tied=0)
        return context.get_dummy_value()

    return types.void(d, high, low, types.uint64, types.uint64, width, terms, exact), generate


@intrinsic
def wgmma_tf32_shared(context, d, a_high, a_low, b_high, b_low, width, terms):
    """wgmma_tf32, exact, with a in shared memory too: descriptors of [64][32 terms] rows of 128 bytes, swizzled."""
    n, steps = _constant(width), _constant(terms) // 8
    lines = [_PREDICATES.replace(".b64 d;", ".b64 d, a;"), "wgmma.fence.sync.aligned;"]
    clear = "no"
    for a, b in ((1, 2), (0, 3), (0, 2)):
        for i in range(steps):
            lines.append(
                f"add.s64 a, ${n // 2 + a}, {_tf32_terms(64, i)}; add.s64 d, ${n // 2 + b}, {_tf32_terms(n, i)}; "
                f"wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 {_names(0, n // 2)}, a, d, {clear}, 1, 1;"
            )
            clear = "yes"
    asm = " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    def generate(context, builder, signature, v):
        outputs, _ = _load(context, builder, signature.args[0], v[0], n // 2, _F)
        _emit(builder, asm, outputs, list(v[1:5]), tied=0)
        return context.get_dummy_value()

    return types.void(d, *(types.uint64,) * 4, width, terms), generate


def _wait(pending, arrays, counts):
    def generate(context, builder, signature, v):
        outputs, inputs = [], []
        for i, count in zip(arrays, counts, strict=False):
            pointers, values = _load(context, builder, signature.args[i], v[i], count, _F)
            outputs, inputs = outputs + pointers, inputs + values
        _emit(builder, f"wgmma.wait_group.sync.aligned {pending};", outputs, inputs, tied=len(outputs))
        return context.get_dummy_value()

    return generate


@intrinsic
def wgmma_wait(context, pending, d, width):
    """Wait until at most `pending` groups run; d[64 x width] is ready then and no use of it moves above the wait."""
    return types.void(pending, d, width), _wait(_constant(pending), (1,), (_constant(width) // 2,))


@intrinsic
def wgmma_wait_both(context, d, width, other, other_width):
    """Wait for every group. d is ready then; the work on `other` stays above the wait, that is, overlaps the product."""
    return (types.void(d, width, other, other_width), _wait(0, (0, 2), (_constant(width) // 2, _constant(other_width) // 2)))


@intrinsic
def wgmma_wait_two(context, pending, d, width, other, other_width):
    """wgmma_wait for two results."""
    counts = _constant(width) // 2, _constant(other_width) // 2
    return types.void(pending, d, width, other, other_width), _wait(_constant(pending), (1, 3), counts)


@intrinsic
def wgmma_wait_three(context, pending, d, width, other, other_width, third, third_width):
    """wgmma_wait for three results."""
    counts = _constant(width) // 2, _constant(other_width) // 2, _constant(third_width) // 2
    signature = types.void(pending, d, width, other, other_width, third, third_width)
    return signature, _wait(_constant(pending), (1, 3, 5), counts)
