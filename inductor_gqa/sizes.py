"""Bytes and FLOPs for a person to read."""

from __future__ import annotations


def bytes_as_text(count: int) -> str:
    """E.g. "512 B", "32.0 KiB", "1.5 MiB", "2.00 GiB"."""
    if count < 2**10:
        return f"{count} B"
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    if count < 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.2f} GiB"


def flops_as_text(count: int) -> str:
    """E.g. "2.1 MFLOP"."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}FLOP"
    return f"{count} FLOP"
