"""Sixteen bytes at a time between global memory and registers, as wide as addresses allow."""

from __future__ import annotations

from numba import uint32

from numba_psa.cuda.device import (
    ld_global_8x16,
    ld_global_u16,
    ld_global_u32,
    ld_global_v2_u32,
    ld_global_v4_u32,
    st_global_u16,
    st_global_u32,
    st_global_v2_u32,
    st_global_v4_u32,
    step,
)


@step
def element_of(words, item, i):
    return words[i] if item == 4 else words[i // 2] >> 16 * (i % 2) & 0xFFFF


@step
def put_element(words, item, i, value):
    if item == 4:
        words[i] = value
    elif i % 2 == 0:
        words[i // 2] = value
    else:
        words[i // 2] |= uint32(value) << 16


@step
def load_chunk(words, item, copy, address, valid):
    """words = 16 bytes; of their elements only `valid` are read."""
    count = 16 // item
    if valid >= count:
        if copy == 16:
            words[0], words[1], words[2], words[3] = ld_global_v4_u32(address)
        elif copy == 8:
            words[0], words[1] = ld_global_v2_u32(address)
            words[2], words[3] = ld_global_v2_u32(address + 8)
        elif copy == 4:
            for i in range(4):
                words[i] = ld_global_u32(address + 4 * i)
        else:
            words[0], words[1], words[2], words[3] = ld_global_8x16(address)
    else:
        for i in range(count):
            if i < valid:
                put_element(words, item, i, ld_global_u32(address + 4 * i) if item == 4 else ld_global_u16(address + 2 * i))


@step
def store_chunk(words, item, copy, address, valid):
    """16 bytes from words; only `valid` elements are written."""
    count = 16 // item
    if valid >= count and copy > 2:
        if copy == 16:
            st_global_v4_u32(address, words[0], words[1], words[2], words[3])
        elif copy == 8:
            st_global_v2_u32(address, words[0], words[1])
            st_global_v2_u32(address + 8, words[2], words[3])
        else:
            for i in range(4):
                st_global_u32(address + 4 * i, words[i])
    else:
        for i in range(count):
            if i < valid:
                if item == 4:
                    st_global_u32(address + 4 * i, words[i])
                else:
                    st_global_u16(address + 2 * i, element_of(words, 2, i))
