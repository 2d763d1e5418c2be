"""PNG files, written fast: one filter, a fast level, and strips of rows compressed by several threads at once.

Pillow tries every filter on every row and compresses on one thread, which takes longer than several denoise steps. The
up filter (each row minus the one above) does as well on generated pictures at the levels that are fast.
"""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

LEVEL = 1
STRIP_BYTES = 2**18  # at least, of uncompressed rows
UP_FILTER = 2
COLOUR_TYPES = {3: 2, 4: 6}  # RGB, RGBA
ZLIB_HEADER = b"\x78\x01"


def encode_png(pixels: np.ndarray) -> bytes:
    """The file of (height, width, 3 or 4) uint8 pixels."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", _compressed(pixels)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def _compressed(pixels: np.ndarray) -> bytes:
    """All filtered rows as one zlib stream. Strips end at byte boundaries and refer to nothing outside themselves, so
    they can be compressed apart and joined."""
    rows = pixels.reshape(len(pixels), -1)
    filtered = np.empty((len(rows), 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = UP_FILTER
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    rows_a_strip = max(1, STRIP_BYTES // filtered.shape[1])
    starts = range(0, len(rows), rows_a_strip)

    def strip(start: int) -> bytes:
        compressor = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS)
        data = compressor.compress(filtered[start : start + rows_a_strip].data)
        is_last = start + rows_a_strip >= len(rows)
        return data + compressor.flush(zlib.Z_FINISH if is_last else zlib.Z_FULL_FLUSH)

    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
        strips = list(pool.map(strip, starts))
    return ZLIB_HEADER + b"".join(strips) + struct.pack(">I", zlib.adler32(filtered.data))
