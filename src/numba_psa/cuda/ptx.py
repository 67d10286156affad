"""PTX operations as Numba intrinsics, one name an instruction. `ptx_sim.py` holds the twin of every name.

`barrier` is cuda.syncthreads. Shared-memory addresses are 32-bit byte addresses, global addresses 64-bit; any Python
integer is accepted and truncated. Fragment layouts are those of the PTX ISA: in a 16 x 8 accumulator lane i holds row
i//4 (and +8), columns 2*(i%4), +1.
"""

from llvmlite import ir
from numba.cuda import syncthreads as barrier  # noqa: F401
from numba.cuda import types
from numba.cuda.extending import intrinsic

f32, u16, u32, u64 = types.float32, types.uint16, types.uint32, types.uint64
_LLVM = {f32: ir.FloatType(), u16: ir.IntType(16), u32: ir.IntType(32), u64: ir.IntType(64)}
_REGISTER = {f32: "f", u16: "h", u32: "r", u64: "l"}


def ptx_op(name, asm, results=(), operands=(), *, effect=True, collective=False, doc):
    """Intrinsic `name(*operands) -> results` around one asm line ($0.. results, then operands).

    effect=False lets the compiler move, merge or drop the operation: right for arithmetic only. collective=True forbids
    it to make the operation depend on a condition that it did not depend on before: right where 32 lanes act as one.
    """
    arguments = ", ".join(f"a{i}" for i in range(len(operands)))
    result = types.void if not results else results[0] if len(results) == 1 else types.UniTuple(results[0], len(results))
    constraints = ["=" + _REGISTER[t] for t in results] + [_REGISTER[t] for t in operands] + ["~{memory}"] * effect
    llvm_results = [_LLVM[t] for t in results]
    llvm_result = (
        ir.VoidType() if not results else llvm_results[0] if len(results) == 1 else ir.LiteralStructType(llvm_results)
    )

    def generate(context, builder, signature, values):
        asm_type = ir.FunctionType(llvm_result, [_LLVM[t] for t in operands])
        value = builder.call(
            ir.InlineAsm(asm_type, asm, ",".join(constraints), side_effect=effect),
            values,
            attrs=("convergent",) * collective,
        )
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return value
        return context.make_tuple(builder, result, [builder.extract_value(value, i) for i in range(len(results))])

    scope = {"answer": (result(*operands), generate)}  # Numba wants a typing function of this very arity
    exec(f"def {name}(context, {arguments}): return answer" if arguments else f"def {name}(context): return answer", scope)
    operation = intrinsic(scope[name])
    operation.__doc__ = doc
    return operation


# ---- tensor cores -----------------------------------------------------------------------------------------------------
def _mma(kind):
    return ptx_op(
        f"mma_m16n8k16_{kind}",
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        (f32,) * 4,
        (u32,) * 6 + (f32,) * 4,
        effect=False,
        collective=True,
        doc="D = A B + C on 16 x 8: a0..a3 pairs of A (rows i//4, +8; columns 2(i%4), +8), b0 b1 of B, c0..c3",
    )


mma_m16n8k16_f16 = _mma("f16")
mma_m16n8k16_bf16 = _mma("bf16")

mma_m16n8k8_tf32 = ptx_op(
    "mma_m16n8k8_tf32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    (f32,) * 4,
    (u32,) * 6 + (f32,) * 4,
    effect=False,
    collective=True,
    doc="D = A B + C on 16 x 8: a0..a3 of A (rows i//4, +8 of column i%4, then of column +4), b0 b1 of B (rows i%4, +4)",
)

# ---- 8 x 8 tiles of 16-bit values, shared memory <-> registers --------------------------------------------------------
ldmatrix_x4 = ptx_op(
    "ldmatrix_x4",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
    (u32,) * 4,
    (u32,),
    collective=True,
    doc="4 tiles: lane i addresses row i%8 of tile i//8 and gets columns 2(i%4), +1 of row i//4 of each tile",
)
ldmatrix_x4_trans = ptx_op(
    "ldmatrix_x4_trans",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
    (u32,) * 4,
    (u32,),
    collective=True,
    doc="ldmatrix_x4, each tile transposed: lane i gets rows 2(i%4), +1 of column i//4",
)
movmatrix_trans = ptx_op(
    "movmatrix_trans",
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    (u32,),
    (u32,),
    collective=True,
    effect=False,
    doc="one tile transposed among the lanes: from columns 2(i%4), +1 of row i//4 to rows 2(i%4), +1 of column i//4",
)


stmatrix_x4_trans = ptx_op(
    "stmatrix_x4_trans",
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1,$2,$3,$4};",
    (),
    (u32,) * 5,
    collective=True,
    doc="the inverse of ldmatrix_x4_trans (sm_90)",
)


# ---- asynchronous copies ----------------------------------------------------------------------------------------------
def _cp_async(size, cache):
    return ptx_op(
        f"cp_async_{size}",
        f"cp.async.{cache}.shared.global [$0], [$1], {size}, $2;",
        (),
        (u32, u64, u32),
        doc=f"(shared, global, n): copy n of {size} bytes in the background, zeros for the rest; both aligned so",
    )


cp_async_16, cp_async_8, cp_async_4 = _cp_async(16, "cg"), _cp_async(8, "ca"), _cp_async(4, "ca")
cp_async_commit = ptx_op("cp_async_commit", "cp.async.commit_group;", doc="close this thread's group of copies")
_WAIT = "cp.async.wait_group %d;"
cp_async_wait_0 = ptx_op("cp_async_wait_0", _WAIT % 0, doc="wait until no group of copies is under way")
cp_async_wait_1 = ptx_op("cp_async_wait_1", _WAIT % 1, doc="wait until at most 1 group is under way")
cp_async_wait_2 = ptx_op("cp_async_wait_2", _WAIT % 2, doc="wait until at most 2 groups are under way")
fence_proxy_async = ptx_op(
    "fence_proxy_async", "fence.proxy.async.shared::cta;", doc="make this thread's shared-memory writes visible to wgmma"
)

# ---- kernels that overlap (sm_90) ---------------------------------------------------------------------------------------
let_next_kernel_start = ptx_op(
    "let_next_kernel_start",
    "griddepcontrol.launch_dependents;",
    doc="this block does not mind if the next kernel of the stream takes multiprocessors that are free",
)
wait_for_previous_kernel = ptx_op(
    "wait_for_previous_kernel",
    "griddepcontrol.wait;",
    doc="until the kernels before have ended and what they wrote can be seen: no access to it, and no store, before",
)

# ---- warp collectives -------------------------------------------------------------------------------------------------
shfl_xor = ptx_op(
    "shfl_xor",
    "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
    (f32,),
    (f32, u32),
    collective=True,
    doc="(x, mask): the x of lane i ^ mask",
)
first_lane = ptx_op(
    "first_lane",
    "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;",
    (u32,),
    (u32,),
    collective=True,
    doc="the x of lane 0, which the compiler then knows to be the same in the whole warp",
)
named_barrier = ptx_op(
    "named_barrier",
    "bar.sync $0, $1;",
    (),
    (u32, u32),
    collective=True,
    doc="(number 1 to 15, n): n threads of the block, whole warps, wait for each other",
)
vote_any = ptx_op(
    "vote_any",
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
    (u32,),
    (u32,),
    collective=True,
    doc="1 in every lane if some lane gives a non-zero",
)

# ---- arithmetic -------------------------------------------------------------------------------------------------------
ex2 = ptx_op("ex2", "ex2.approx.ftz.f32 $0, $1;", (f32,), (f32,), effect=False, doc="2**x, one instruction")
pack_f16x2 = ptx_op(
    "pack_f16x2",
    "cvt.rn.f16x2.f32 $0, $2, $1;",
    (u32,),
    (f32, f32),
    effect=False,
    doc="(low, high): two values rounded to float16 in one register",
)
pack_bf16x2 = ptx_op(
    "pack_bf16x2",
    "cvt.rn.bf16x2.f32 $0, $2, $1;",
    (u32,),
    (f32, f32),
    effect=False,
    doc="(low, high): two values rounded to bfloat16 in one register",
)

join_u16 = ptx_op("join_u16", "mov.b32 $0, {$1, $2};", (u32,), (u16, u16), effect=False, doc="(low, high): one word")

maximum = ptx_op(
    "maximum",
    "max.f32 $0, $1, $2;",
    (f32,),
    (f32, f32),
    effect=False,
    doc="the larger; the other one if one is NaN (max() under fastmath may return either)",
)
logarithm = ptx_op("logarithm", "lg2.approx.f32 $0, $1;", (f32,), (f32,), effect=False, doc="log2(x), one instruction")
float_bits = ptx_op(
    "float_bits",
    "mov.b32 $0, $1;",
    (u32,),
    (f32,),
    effect=False,
    doc="the bits of x; integer comparisons of them survive fastmath, which assumes that no NaN exists",
)
bits_float = ptx_op("bits_float", "mov.b32 $0, $1;", (f32,), (u32,), effect=False, doc="the float with these bits")
widen_f16 = ptx_op("widen_f16", "cvt.f32.f16 $0, $1;", (f32,), (u16,), effect=False, doc="the float of these float16 bits")
funnel_shift = ptx_op(
    "funnel_shift",
    "shf.r.wrap.b32 $0, $1, $2, $3;",
    (u32,),
    (u32, u32, u32),
    effect=False,
    doc="(low, high, n): the lower half of the 64 bits high:low shifted right by n < 32",
)
round_tf32 = ptx_op(
    "round_tf32",
    "cvt.rna.tf32.f32 $0, $1;",
    (u32,),
    (f32,),
    effect=False,
    doc="the bits of x rounded to TF32, halves away from zero",
)

keep_above = ptx_op(
    "keep_above",
    "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p st.shared.f32 [$1], $0; }",
    (),
    (f32, u32),
    doc="(x >= 0, any shared address): no effect, but the work that makes x cannot move below this point",
)


# ---- plain memory -----------------------------------------------------------------------------------------------------
def _move(name, kind, count):
    """The operation that `name` spells: {ld, st}_{global, shared}_{v4, v2}_{type}."""
    pointer = u64 if "global" in name else u32
    where = "global.nc" if name.startswith("ld_global") else name.split("_")[1]
    vector = f".v{count}" if count > 1 else ""
    type_ = f"{'f' if kind is f32 else 'u'}{kind.bitwidth}"
    values = (kind,) * count
    doc = f"{kind.bitwidth // 8 * count}-byte {'load, read-only' if '.nc' in where else 'load or store'}"
    if name.startswith("ld"):
        names = ",".join(f"${i}" for i in range(count))
        names = f"{{{names}}}" if count > 1 else names
        return ptx_op(name, f"ld.{where}{vector}.{type_} {names}, [${count}];", values, (pointer,), doc=doc)
    names = ",".join(f"${i + 1}" for i in range(count))
    names = f"{{{names}}}" if count > 1 else names
    return ptx_op(name, f"st.{where}{vector}.{type_} [$0], {names};", (), (pointer, *values), doc=doc)


ld_global_u16, st_global_u16 = _move("ld_global_u16", u16, 1), _move("st_global_u16", u16, 1)
ld_global_u32, st_global_u32 = _move("ld_global_u32", u32, 1), _move("st_global_u32", u32, 1)
ld_global_f32, st_global_f32 = _move("ld_global_f32", f32, 1), _move("st_global_f32", f32, 1)
ld_global_v2_u32, st_global_v2_u32 = _move("ld_global_v2_u32", u32, 2), _move("st_global_v2_u32", u32, 2)
ld_global_v4_u32, st_global_v4_u32 = _move("ld_global_v4_u32", u32, 4), _move("st_global_v4_u32", u32, 4)
ld_shared_u16, st_shared_u16 = _move("ld_shared_u16", u16, 1), _move("st_shared_u16", u16, 1)
ld_shared_u32, st_shared_u32 = _move("ld_shared_u32", u32, 1), _move("st_shared_u32", u32, 1)
ld_shared_f32, st_shared_f32 = _move("ld_shared_f32", f32, 1), _move("st_shared_f32", f32, 1)
ld_shared_v2_u32, st_shared_v2_u32 = _move("ld_shared_v2_u32", u32, 2), _move("st_shared_v2_u32", u32, 2)
ld_shared_v4_u32, st_shared_v4_u32 = _move("ld_shared_v4_u32", u32, 4), _move("st_shared_v4_u32", u32, 4)
ld_shared_v2_f32 = _move("ld_shared_v2_f32", f32, 2)
ld_shared_v4_f32 = _move("ld_shared_v4_f32", f32, 4)


def _move_if(name, kind, count):
    """The load that `name` spells, {load, fetch}_{v4, v2}_{type}, without a branch: many can be under way at once."""
    where = "global.nc" if name.startswith("load") else "global"
    vector = f".v{count}" if count > 1 else ""
    names = ",".join(f"${i}" for i in range(count))
    zeros = " ".join(f"mov.b{kind.bitwidth} ${i}, 0;" for i in range(count))
    target = f"{{{names}}}" if count > 1 else names
    load = f"ld.{where}{vector}.u{kind.bitwidth} {target}, [${count}]"
    return ptx_op(
        name,
        f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, 0; {zeros} @p {load}; }}",
        (kind,) * count,
        (u64, u32),
        doc=f"(address, condition): {kind.bitwidth // 8 * count} bytes of global memory, zeros if the condition is 0",
    )


load_v4_u32 = _move_if("load_v4_u32", u32, 4)  # of what no kernel that runs writes
fetch_u16, fetch_u32 = _move_if("fetch_u16", u16, 1), _move_if("fetch_u32", u32, 1)  # of what one may have just written
fetch_v2_u32, fetch_v4_u32 = _move_if("fetch_v2_u32", u32, 2), _move_if("fetch_v4_u32", u32, 4)

ld_global_8x16 = ptx_op(
    "ld_global_8x16",
    "{ .reg .pred odd; .reg .b64 t, w; .reg .b32 s, x0, x1, x2, x3, e; .reg .b16 h0, h7;"
    " and.b64 t, $4, 2; setp.ne.u64 odd, t, 0; add.u64 w, $4, t; cvt.u32.u64 s, t; shl.b32 s, s, 3;"
    " mov.b16 h0, 0; mov.b16 h7, 0; mov.b32 x3, 0;"
    " ld.global.nc.u32 x0, [w]; ld.global.nc.u32 x1, [w+4]; ld.global.nc.u32 x2, [w+8];"
    " @!odd ld.global.nc.u32 x3, [w+12]; @odd ld.global.nc.u16 h0, [$4]; @odd ld.global.nc.u16 h7, [$4+14];"
    " @odd cvt.u32.u16 x3, h7; cvt.u32.u16 e, h0; shl.b32 e, e, 16;"
    " shf.l.wrap.b32 $0, e, x0, s; shf.l.wrap.b32 $1, x0, x1, s; shf.l.wrap.b32 $2, x1, x2, s;"
    " shf.l.wrap.b32 $3, x2, x3, s; }",
    (u32,) * 4,
    (u64,),
    doc="eight 16-bit values from an address that is a multiple of 2 only; touches not a byte beside them",
)


@intrinsic
def shared_address(context, array):
    """32-bit byte address of a cuda.shared.array."""

    def generate(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        byte = ir.IntType(8)
        data = builder.addrspacecast(builder.bitcast(data, ir.PointerType(byte)), ir.PointerType(byte, 3))
        return builder.ptrtoint(data, ir.IntType(32))

    return u32(array), generate
