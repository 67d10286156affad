"""Twins of ptx.py for NUMBA_ENABLE_CUDASIM=1: the same names in plain Python. Warp collectives meet at a barrier."""

import ctypes
import threading

import numpy as np

_LANES = np.arange(32)
_ROW, _PAIR = _LANES // 4, 2 * (_LANES % 4)


# ---- threads that act as one meet here --------------------------------------------------------------------------------
class _Meeting:
    def __init__(self, size):
        self.given, self.taken, self.function = [None] * size, [None] * size, None
        self.arrive, self.leave = threading.Barrier(size, action=self._compute), threading.Barrier(size)

    def _compute(self):
        self.taken = self.function(self.given)


_meetings_lock = threading.Lock()


def collective(function, *arguments, size=32):
    """Every lane calls this; function gets all `size` argument tuples at once and returns as many results."""
    thread = threading.current_thread()
    group, lane = divmod(thread.thread_id, size)
    with _meetings_lock:
        meetings = thread._manager.__dict__.setdefault("_meetings", {})
        if (size, group) not in meetings:
            meetings[size, group] = _Meeting(size)
        meeting = meetings[size, group]
    meeting.given[lane], meeting.function = arguments, function
    meeting.arrive.wait()
    result = meeting.taken[lane]
    meeting.leave.wait()
    return result


def named_barrier(number, count):
    collective(lambda given: given, number, size=int(count))


def barrier():
    threading.current_thread().syncthreads()


# ---- memory -----------------------------------------------------------------------------------------------------------
def shared_address(array):
    threading.current_thread()._manager._shared = array.view(np.uint8)
    return 0


def shared_bytes():
    return threading.current_thread()._manager._shared


def _load_shared(dtype, count):
    def load(address):
        size = np.dtype(dtype).itemsize * count
        values = shared_bytes()[int(address) : int(address) + size].copy().view(dtype)
        return values[0] if count == 1 else tuple(values)

    return load


def _store_shared(dtype):
    def store(address, *values):
        data = np.array([dtype(v) for v in values], dtype).view(np.uint8)
        shared_bytes()[int(address) : int(address) + data.size] = data

    return store


def _load_global(kind, dtype, count=1):
    def load(address):
        assert address % (ctypes.sizeof(kind) * count) == 0, "a global load wants its own alignment"
        values = (kind * count).from_address(int(address))
        return dtype(values[0]) if count == 1 else tuple(dtype(value) for value in values)

    return load


def _store_global(kind):
    def store(address, *values):
        assert address % (ctypes.sizeof(kind) * len(values)) == 0, "a global store wants its own alignment"
        mask = (1 << 8 * ctypes.sizeof(kind)) - 1
        (kind * len(values)).from_address(int(address))[:] = [int(v) & mask for v in values]

    return store


ld_global_u16, st_global_u16 = _load_global(ctypes.c_uint16, np.uint16), _store_global(ctypes.c_uint16)
ld_global_u32, st_global_u32 = _load_global(ctypes.c_uint32, np.uint32), _store_global(ctypes.c_uint32)
ld_global_f32 = _load_global(ctypes.c_float, np.float32)
ld_global_v2_u32, st_global_v2_u32 = _load_global(ctypes.c_uint32, np.uint32, 2), _store_global(ctypes.c_uint32)
ld_global_v4_u32, st_global_v4_u32 = _load_global(ctypes.c_uint32, np.uint32, 4), _store_global(ctypes.c_uint32)
ld_shared_u16, st_shared_u16 = _load_shared(np.uint16, 1), _store_shared(np.uint16)
ld_shared_u32, st_shared_u32 = _load_shared(np.uint32, 1), _store_shared(np.uint32)
ld_shared_f32, st_shared_f32 = _load_shared(np.float32, 1), _store_shared(np.float32)
ld_shared_v2_u32, st_shared_v2_u32 = _load_shared(np.uint32, 2), _store_shared(np.uint32)
ld_shared_v4_u32, st_shared_v4_u32 = _load_shared(np.uint32, 4), _store_shared(np.uint32)
ld_shared_v2_f32 = _load_shared(np.float32, 2)
ld_shared_v4_f32 = _load_shared(np.float32, 4)


def _load_if(load, nothing):
    return lambda address, condition: load(address) if condition else nothing


fetch_u16, fetch_u32 = _load_if(ld_global_u16, np.uint16(0)), _load_if(ld_global_u32, np.uint32(0))
fetch_v2_u32 = _load_if(ld_global_v2_u32, (np.uint32(0),) * 2)
fetch_v4_u32 = load_v4_u32 = _load_if(ld_global_v4_u32, (np.uint32(0),) * 4)


def st_global_f32(address, value):
    st_global_u32(address, float_bits(value))


def ld_global_8x16(address):
    assert address % 2 == 0
    halves = (ctypes.c_uint16 * 8).from_address(int(address))
    return tuple(np.uint32(halves[2 * i] | halves[2 * i + 1] << 16) for i in range(4))


def _cp_async(size):
    def copy(shared, source, count):
        assert shared % size == 0, f"cp.async wants {size}-byte alignment in shared memory"
        assert count == 0 or source % size == 0, f"cp.async wants {size}-byte alignment in global memory"
        target = shared_bytes()[int(shared) : int(shared) + size]
        target[:] = 0
        target[:count] = np.frombuffer((ctypes.c_uint8 * count).from_address(int(source)), np.uint8) if count else 0

    return copy


cp_async_16, cp_async_8, cp_async_4 = _cp_async(16), _cp_async(8), _cp_async(4)


def cp_async_commit():
    """Copies are done at once here."""


def keep_above(x, address):
    assert not x < 0


cp_async_wait_0 = cp_async_wait_1 = cp_async_wait_2 = fence_proxy_async = cp_async_commit
let_next_kernel_start = wait_for_previous_kernel = cp_async_commit


# ---- arithmetic -------------------------------------------------------------------------------------------------------
def ex2(x):
    with np.errstate(all="ignore"):
        return np.exp2(np.float32(x))


def logarithm(x):
    with np.errstate(all="ignore"):
        return np.log2(np.float32(x))


def maximum(x, y):
    return np.fmax(np.float32(x), np.float32(y))


def float_bits(x):
    return int(np.float32(x).view(np.uint32))


def funnel_shift(low, high, n):
    return np.uint32((int(high) << 32 | int(low)) >> int(n) & 0xFFFFFFFF)


def join_u16(low, high):
    return np.uint32(int(low) | int(high) << 16)


def bits_float(x):
    return np.uint32(x).view(np.float32)


def widen_f16(word):
    return np.uint16(int(word) & 0xFFFF).view(np.float16).astype(np.float32)


def _f16_bits(x):
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)


def _bf16_bits(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF).astype(np.uint32)


def pack_f16x2(low, high):
    return np.uint32(_f16_bits(low) | _f16_bits(high) << 16)


def pack_bf16x2(low, high):
    return np.uint32(_bf16_bits(low) | _bf16_bits(high) << 16)


def unpack_f16(words):
    return np.stack(
        [(words & 0xFFFF).astype(np.uint16).view(np.float16), (words >> 16).astype(np.uint16).view(np.float16)]
    ).astype(np.float32)


def unpack_bf16(words):
    return np.stack([(words << np.uint32(16)).view(np.float32), (words & np.uint32(0xFFFF0000)).view(np.float32)])


# ---- warp collectives -------------------------------------------------------------------------------------------------
def shfl_xor(x, mask):
    return collective(lambda given: [given[lane ^ given[lane][1]][0] for lane in range(32)], x, mask)


def first_lane(x):
    return int(collective(lambda given: [given[0][0]] * 32, x))


def vote_any(x):
    return collective(lambda given: [int(any(bool(g[0]) for g in given))] * 32, x)


def _mma(unpack):
    def multiply(given):
        words = np.array([[int(w) for w in g[:6]] for g in given], np.uint32)
        pairs = unpack(np.ascontiguousarray(words))  # [low, high][lane][register]
        a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
        for i, (down, right) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for h in range(2):
                a[_ROW + down, _PAIR + right + h] = pairs[h, :, i]
        for i in range(2):
            for h in range(2):
                b[_PAIR + 8 * i + h, _ROW] = pairs[h, :, 4 + i]
        places = [(_ROW, _PAIR), (_ROW, _PAIR + 1), (_ROW + 8, _PAIR), (_ROW + 8, _PAIR + 1)]
        for i, place in enumerate(places):
            c[place] = [g[6 + i] for g in given]
        d = a @ b + c
        return list(zip(*(d[place] for place in places), strict=False))

    return lambda *registers: collective(multiply, *registers)


mma_m16n8k16_f16, mma_m16n8k16_bf16 = _mma(unpack_f16), _mma(unpack_bf16)


def round_tf32(x):
    bits = np.uint64(float_bits(x))
    return int(bits if bits & 0x7F800000 == 0x7F800000 else (bits + 0x1000) & 0xFFFFE000)


def unpack_tf32(words):
    return (words & np.uint32(0xFFFFE000)).view(np.float32)


def _multiply_tf32(given):
    words = unpack_tf32(np.array([[int(w) for w in g[:6]] for g in given], np.uint32))
    a, b, c = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32), np.zeros((16, 8), np.float32)
    column = _LANES % 4
    for i in range(4):
        a[_ROW + i % 2 * 8, column + i // 2 * 4] = words[:, i]
    for i in range(2):
        b[column + 4 * i, _ROW] = words[:, 4 + i]
    places = [(_ROW, _PAIR), (_ROW, _PAIR + 1), (_ROW + 8, _PAIR), (_ROW + 8, _PAIR + 1)]
    for i, place in enumerate(places):
        c[place] = [g[6 + i] for g in given]
    with np.errstate(all="ignore"):
        d = a @ b + c
    return list(zip(*(d[place] for place in places), strict=True))


def mma_m16n8k8_tf32(*registers):
    return collective(_multiply_tf32, *registers)


def _ldmatrix(transposed):
    def load(given):
        memory, out = given[0][1], np.zeros((32, 4), np.uint32)
        for tile in range(4):
            rows = np.stack([memory[int(a) : int(a) + 16].view(np.uint16) for a, _ in given[8 * tile : 8 * tile + 8]])
            rows = np.ascontiguousarray(rows.T if transposed else rows).view(np.uint32)
            out[:, tile] = rows[_ROW, _PAIR // 2]
        return [tuple(lane) for lane in out]

    return lambda address: collective(load, address, shared_bytes())


ldmatrix_x4, ldmatrix_x4_trans = _ldmatrix(False), _ldmatrix(True)


def movmatrix_trans(word):
    def transpose(given):
        tile = np.array([int(g[0]) for g in given], np.uint32).reshape(8, 4).view(np.uint16)
        return list(np.ascontiguousarray(tile.T).view(np.uint32).reshape(32))

    return collective(transpose, word)


def _stmatrix(given):
    memory = given[0][5]
    words = np.array([[int(w) for w in g[1:5]] for g in given], np.uint32)
    for tile in range(4):
        rows = np.ascontiguousarray(words[:, tile].reshape(8, 4)).view(np.uint16).T
        for r in range(8):
            address = int(given[8 * tile + r][0])
            memory[address : address + 16] = np.ascontiguousarray(rows[r]).view(np.uint8)
    return [None] * 32


def stmatrix_x4_trans(address, *words):
    collective(_stmatrix, address, *words, shared_bytes())
