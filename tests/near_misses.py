"""Functions that are almost an attention, registered with what must become of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import never_wrong
from spellings import angles
from torch import Tensor

D, L = 8, 11


def tensors(B: int = 2, H: int = 4, K: int = 4, S: int = L) -> list[Tensor]:
    generator = torch.Generator().manual_seed(23)
    shapes = ((B, H, L, D), (B, K, S, D), (B, K, S, D))
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def grouped() -> list[Tensor]:
    return tensors(K=2)


def tables(first: int = 0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, D] of positions from `first` on; no two columns are equal."""
    at = angles(64, D)[first : first + L] + torch.arange(D) / 10
    return at.cos(), at.sin()


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.4) -> Tensor:
    return torch.softmax(q @ k.mT * scale, -1) @ v


class NearMisses:
    """A file's functions of q, k, v, by name."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Any, ...]] = {}

    def __call__(
        self,
        make: Callable[[], list[Tensor]] = tensors,
        left: str | None = "accepted",
        train: bool = True,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a function. left: a piece of the reason; None: it must be fused; not given:
        either. train: whether eager has a backward, which needs what it saved unchanged."""

        def register(f: Callable[..., Any]) -> Callable[..., Any]:
            self.known[f.__name__] = (f, make, left, train)
            return f

        return register

    def each(self) -> Any:
        """Parametrizes a test by `name` and `train`."""
        cases = [(n, t) for n in self.known for t in (False, True) if self.known[n][3] or not t]
        ids = [f"{n}-{'training' if t else 'inference'}" for n, t in cases]
        return pytest.mark.parametrize(("name", "train"), cases, ids=ids)

    def check(self, name: str, train: bool) -> None:
        f, make, left, _ = self.known[name]
        never_wrong(f, *make(), train=train, left=left)
