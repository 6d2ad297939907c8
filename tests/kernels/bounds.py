"""Triton's interpreter with an eye on addresses: no kernel may touch a byte outside its tensors.

On a GPU such a read is silent until it hits an unmapped page; here every active address of every
load and store is held against the storages that the launch was given.
"""

import bisect
import contextlib
from unittest import mock

import torch
from triton.runtime import interpreter

from inductor_gqa.kernels import plan


@contextlib.contextmanager
def checked_addresses():
    """Within it, kernels that `plan.execute` launches raise IndexError on the first stray address."""
    spans = []
    builder = interpreter.InterpreterBuilder
    plain_load, plain_store, plain_empty = (
        builder.create_masked_load,
        builder.create_masked_store,
        torch.empty,
    )

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

    plain_execute = plan.execute

    def execute(made, tensors):
        spans.clear()
        for x in tensors.values():
            know(x)
        with mock.patch.object(torch, "empty", lambda *a, **k: know(plain_empty(*a, **k))):
            return plain_execute(made, tensors)

    with (
        mock.patch.object(builder, "create_masked_load", load),
        mock.patch.object(builder, "create_masked_store", store),
    ):
        yield execute


def _groups(addresses, spans):
    """The addresses by the storage that begins before them: (its span, the group's last)."""
    import numpy as np

    starts = np.array([start for start, _ in spans], dtype=np.uint64)
    index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    if (index < 0).any():
        raise IndexError("address lies before every tensor")
    for i in np.unique(index):
        yield spans[i], int(addresses[index == i].max())
