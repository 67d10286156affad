"""Twins of wgmma.py: the 128 threads of a warpgroup meet and multiply at once. Numbers only, no asynchrony."""

import numpy as np

from numba_psa.cuda.ptx_sim import collective, shared_bytes, unpack_bf16, unpack_f16, unpack_tf32

_THREADS = np.arange(128)
_ROW, _PAIR = _THREADS // 32 * 16 + _THREADS % 32 // 4, 2 * (_THREADS % 4)


def _operand(descriptor, offset, k, n, transposed, unpack):
    """b[k][n] behind a matrix descriptor with 128-byte swizzle: bits 4-6 of an address are XORed with bits 7-9."""
    start, leading, stride = ((int(descriptor) >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    k, n = np.arange(k)[:, None], np.arange(n)[None, :]
    if transposed:
        logical = n // 64 * leading + k // 8 * stride + k % 8 * 128 + n % 64 * 2
    else:
        logical = n // 8 * stride + n % 8 * 128 + 2 * k
    address = start + offset + logical
    address ^= (address >> 7 & 7) << 4
    return unpack(shared_bytes().view(np.uint16)[address // 2].astype(np.uint32))[0]


def _multiply(given, steps, n, offsets, transposed, clear, unpack):
    d = np.zeros((64, n), np.float32)
    places = [(_ROW + 8 * (i // 2), _PAIR + i % 2) for i in range(4)]
    tiles = np.stack([arrays[0].reshape(n // 8, 4) for arrays in given])  # thread, column tile, i
    words = np.stack([np.asarray(arrays[1], np.uint32).reshape(-1, 4)[:steps] for arrays in given])
    if not clear:
        for tile in range(n // 8):
            for i, (row, column) in enumerate(places):
                d[row, column + 8 * tile] = tiles[:, tile, i]
    for step in range(steps):
        a = np.zeros((64, 16), np.float32)
        halves = unpack(np.ascontiguousarray(words[:, step]))
        for i in range(4):
            for h in range(2):
                a[_ROW + 8 * (i % 2), _PAIR + 8 * (i // 2) + h] = halves[h, :, i]
        d += a @ _operand(given[0][2], offsets[step], 16, n, transposed, unpack)
    for thread, arrays in enumerate(given):
        out = arrays[0].reshape(n // 8, 4)
        for i, (row, column) in enumerate(places):
            out[:, i] = d[row[thread], column[thread] :: 8][: n // 8]
    return [None] * 128


def wgmma_scores(s, q, keys, block, key_dim, bf16):
    steps, unpack = key_dim // 16, unpack_bf16 if bf16 else unpack_f16
    offsets = [2048 * i for i in range(steps)]
    collective(lambda given: _multiply(given, steps, block, offsets, True, True, unpack), s, q, keys, size=128)


def _hand_out(given, d):
    """The accumulators of every thread from the product."""
    for thread, arrays in enumerate(given):
        out = arrays[0].reshape(d.shape[1] // 8, 4)
        for i in range(4):
            out[:, i] = d[_ROW[thread] + 8 * (i // 2), _PAIR[thread] + i % 2 :: 8][: d.shape[1] // 8]


def wgmma_values(acc, p, values, value_dim, block, tile_bytes, bf16):
    steps, unpack = block // 16, unpack_bf16 if bf16 else unpack_f16
    offsets = [i // 4 * tile_bytes + i % 4 * 32 for i in range(steps)]
    collective(lambda given: _multiply(given, steps, value_dim, offsets, False, False, unpack), acc, p, values, size=128)


def _tf32_operand(descriptor, step, n):
    """b[k][n] for eight terms: rows of 128 bytes, eight of them 1024 bytes apart, swizzled."""
    start = ((int(descriptor) & 0x3FFF) << 4) + step // 4 * (128 * n)
    row, k = np.arange(n)[None, :], np.arange(8)[:, None]
    address = start + 32 * (step % 4) + row // 8 * 1024 + row % 8 * 128 + 4 * k
    address ^= (address >> 7 & 7) << 4
    return unpack_tf32(shared_bytes().view(np.uint32)[address // 4])


def _multiply_tf32(given, n, steps, exact):
    d = np.zeros((64, n), np.float32)
    column = _THREADS % 4
    products = [(2, 4), (1, 5), (1, 4)] if exact else [(1, 4)]
    # given: d, high, low, b_high, b_low of every thread
    for part, operand in products:
        words = np.stack([np.asarray(arrays[part], np.uint32).reshape(-1, 4)[:steps] for arrays in given])
        for step in range(steps):
            a = np.zeros((64, 8), np.float32)
            for i in range(4):
                a[_ROW + i % 2 * 8, column + i // 2 * 4] = unpack_tf32(np.ascontiguousarray(words[:, step, i]))
            with np.errstate(all="ignore"):
                d += a @ _tf32_operand(given[0][operand - 1], step, n)
    places = [(_ROW + 8 * (i // 2), _PAIR + i % 2) for i in range(4)]
    for thread, arrays in enumerate(given):
        out = arrays[0].reshape(n // 8, 4)
        for i, (row, first) in enumerate(places):
            out[:, i] = d[row[thread], first[thread] :: 8][: n // 8]
    return [None] * 128


def wgmma_tf32(d, high, low, b_high, b_low, width, terms, exact):
    arguments = d, high, low, b_high, b_low
    collective(lambda given: _multiply_tf32(given, width, terms // 8, exact), *arguments, size=128)


def _multiply_tf32_shared(given, n, steps):
    _, a_high, a_low, b_high, b_low = given[0]
    d = np.zeros((64, n), np.float32)
    with np.errstate(all="ignore"):
        for a, b in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
            for step in range(steps):
                d += _tf32_operand(a, step, 64).T @ _tf32_operand(b, step, n)
    _hand_out(given, d)
    return [None] * 128


def wgmma_tf32_shared(d, a_high, a_low, b_high, b_low, width, terms):
    arguments = d, a_high, a_low, b_high, b_low
    collective(lambda given: _multiply_tf32_shared(given, width, terms // 8), *arguments, size=128)


def wgmma_wait(pending, d, width):
    """Products are done at once here."""


def wgmma_wait_both(d, width, other, other_width):
    """Products are done at once here."""


def wgmma_wait_two(pending, d, width, other, other_width):
    """Products are done at once here."""


def wgmma_wait_three(pending, d, width, other, other_width, third, third_width):
    """Products are done at once here."""
