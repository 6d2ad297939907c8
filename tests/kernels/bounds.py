"""Triton's interpreter with an eye on addresses: no kernel may touch a byte outside its tensors.

On a GPU such a read is silent until it hits an unmapped page; here every active address of every
load and store is held against the storages that the launch was given.
"""

import bisect
import contextlib
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from inductor_gqa.kernels import plan


@contextlib.contextmanager
def deterministic_algorithms():
    """New memory then starts as NaN: what a kernel leaves unwritten, and another reads, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def checked_addresses():
    """Yields a `plan.execute` that raises on the first address outside of the plan's tensors."""
    spans = []
    builder = interpreter.InterpreterBuilder
    plain_load, plain_store = builder.create_masked_load, builder.create_masked_store
    plain_empty, plain_execute = torch.empty_strided, plan.execute

    def know(x):
        storage = x.untyped_storage()
        bisect.insort(spans, (storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return x

    def check(what, pointers, mask, size):
        active = pointers[mask.astype(bool)] if mask.shape == pointers.shape else pointers.ravel()
        if active.size == 0:
            return
        for first, last in _groups(active, spans):
            if last + size > first[1]:
                raise IndexError(f"{what}: address is {last - first[1] + size} bytes past a tensor")

    def load(self, ptrs, mask, *rest, **named):
        check("load", ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8 or 1)
        return plain_load(self, ptrs, mask, *rest, **named)

    def store(self, ptrs, value, mask, *rest, **named):
        check("store", ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8 or 1)
        return plain_store(self, ptrs, value, mask, *rest, **named)

    def execute(made, tensors):
        spans.clear()
        for x in tensors.values():
            know(x)
        noted = mock.patch.object(
            torch, "empty_strided", lambda *a, **k: know(plain_empty(*a, **k))
        )
        with noted:
            return plain_execute(made, tensors)

    with (
        mock.patch.object(builder, "create_masked_load", load),
        mock.patch.object(builder, "create_masked_store", store),
    ):
        yield execute


def _groups(addresses, spans):
    """The addresses by the storage that begins before them: (its span, the group's last)."""
    first, last = int(addresses.min()), int(addresses.max())
    place = bisect.bisect_right(spans, first, key=lambda span: span[0]) - 1
    if place >= 0 and last < spans[place][1]:  # as nearly always: all within one storage
        yield spans[place], last
        return
    starts = np.array([start for start, _ in spans], dtype=np.uint64)
    index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    if (index < 0).any():
        raise IndexError("address lies before every tensor")
    for i in np.unique(index):
        yield spans[i], int(addresses[index == i].max())
