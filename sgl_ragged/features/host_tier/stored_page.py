"""Pages in storage: a slab's row, and a footer by which damaged or foreign pages are detected."""

from __future__ import annotations

import struct
import zlib

import torch

FORMAT_VERSION = 1

_FOOTER = struct.Struct("<4sII")
_MAGIC = b"SLAB"

FOOTER_BYTES = _FOOTER.size


def write_page(row: torch.Tensor, identity: str) -> torch.Tensor:
    """Return a copy of the row with its footer, uint8 [row bytes + FOOTER_BYTES].

    Args:
        row: uint8 [row bytes], on the host.
        identity: digest of all settings that decide the bytes of a row; the checksum starts from it.
    """
    footer = _FOOTER.pack(_MAGIC, FORMAT_VERSION, _checksum(row, identity))
    return torch.cat([row, torch.frombuffer(bytearray(footer), dtype=torch.uint8)])


def read_page(page: torch.Tensor, identity: str) -> torch.Tensor | None:
    """Return a view on the row of a page, uint8 [row bytes]; None if it is damaged or has another identity."""
    row, footer = page[:-FOOTER_BYTES], page[-FOOTER_BYTES:]
    magic, version, checksum = _FOOTER.unpack(footer.numpy().tobytes())
    whole = magic == _MAGIC and version == FORMAT_VERSION and checksum == _checksum(row, identity)
    return row if whole else None


def _checksum(row: torch.Tensor, identity: str) -> int:
    return zlib.crc32(memoryview(row.numpy()), zlib.crc32(identity.encode()))
