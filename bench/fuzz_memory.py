"""Memory in which a kernel's mistakes show: every tensor lies between bytes that are NaN in any
floating-point dtype.

What is read from there makes a result NaN; what is written there, or into an operand, is seen
afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import torch

GUARD = 512  # bytes before and after, a multiple of every alignment
POISON = 255  # as all bytes of a number: NaN; -1 as an integer, set as a bool


class Memory:
    """The buffers of one example, and what they held before the kernels ran."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.operands: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.made: list[tuple[torch.Tensor, int]] = []

    def placed(
        self,
        x: torch.Tensor,
        order: Sequence[int],
        gap: int = 0,
        step: int = 1,
        flat: Sequence[int] = (),
        offset: int = 0,
    ) -> torch.Tensor:
        """The values of x with its dims in memory in `order`, `gap` elements after each row, `step`
        elements between those of a row, no stride in the `flat` dims (their first values are
        kept), `offset` elements off alignment."""
        strides, size = [0] * x.dim(), 1
        for i, dim in enumerate(reversed(order)):
            if dim in flat:
                continue
            strides[dim] = size * (step if i == 0 else 1)
            size *= x.shape[dim] * (step if i == 0 else 1)
            size += gap if i == 0 else 0
        bytes_held = (size + offset) * x.dtype.itemsize
        buffer = self._poisoned(2 * GUARD + bytes_held + -bytes_held % 16)
        start = GUARD // x.dtype.itemsize + offset
        view = buffer.view(x.dtype).as_strided(x.shape, strides, start)
        values = x
        for dim in flat:
            values = values.narrow(dim, 0, 1)
        narrow = view
        for dim in flat:
            narrow = narrow.narrow(dim, 0, 1)
        narrow.copy_(values)
        self.operands.append((buffer, buffer.clone()))
        return view

    @contextlib.contextmanager
    def guards_results(self) -> Generator[None, None, None]:
        """New tensors start as NaN and have guards of their own."""
        strided, plain = torch.empty_strided, torch.empty

        def guarded(shape: Any, strides: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            bytes_held = 0 if 0 in shape else (last + 1) * dtype.itemsize
            bytes_held += -bytes_held % 16
            buffer = plain(2 * GUARD + bytes_held, dtype=torch.uint8, device=device).fill_(POISON)
            self.made.append((buffer, bytes_held))
            return buffer.view(dtype).as_strided(shape, strides, GUARD // dtype.itemsize)

        def contiguous(*shape: Any, **named: Any) -> torch.Tensor:
            if set(named) != {"dtype", "device"} or len(shape) != 1 or isinstance(shape[0], int):
                return plain(*shape, **named)
            strides, size = [0] * len(shape[0]), 1
            for i in reversed(range(len(shape[0]))):
                strides[i], size = size, size * shape[0][i]
            return guarded(shape[0], strides, **named)

        def by_strides(shape: Any, strides: Any, **named: Any) -> torch.Tensor:
            is_ours = set(named) == {"dtype", "device"}
            return (guarded if is_ours else strided)(shape, strides, **named)

        with (
            mock.patch.object(torch, "empty_strided", by_strides),
            mock.patch.object(torch, "empty", contiguous),
        ):
            yield

    def wrong(self) -> list[str]:
        """What was written where nothing may be written."""
        found: list[str] = []
        for buffer, before in self.operands:
            changed = int((buffer != before).sum())
            if changed:
                found.append(f"operands: {changed} bytes of one were written, accepted none")
        for buffer, bytes_held in self.made:
            ends = torch.cat((buffer[:GUARD], buffer[GUARD + bytes_held :]))
            changed = int((ends != POISON).sum())
            if changed:
                found.append(f"results: {changed} bytes beside one were written, accepted none")
        return found

    def _poisoned(self, size: int) -> torch.Tensor:
        return torch.full((size,), POISON, dtype=torch.uint8, device=self.device)
