"""Few queries over a long cache: data of one shape of bench/decode.py and what is true for it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import torch

PATTERN = re.compile(r"B(\d+)-L(\d+)-S(\d+)-D(\d+)(?:-W(\d+))?(?:-F(\d+))?")
Results = tuple[torch.Tensor, ...]


def sizes_of(name: str) -> tuple[int, int, int, int, int | None, int | None]:
    """B, L, S, D, window and filled length of a shape; raises ValueError where it names none."""
    found = PATTERN.fullmatch(name)
    if not found:
        raise ValueError(f"shape is {name}, accepted as B8-L1-S32768-D128-W4096-F8192")
    B, L, S, D = (int(x) for x in found.groups()[:4])
    window, filled = (None if x is None else int(x) for x in found.groups()[4:])
    first = 0 if window is None else S - L - window + 1
    if L > S or filled == 0 or (filled is not None and filled <= first):
        raise ValueError(f"shape is {name}, where a query sees no key")
    return B, L, S, D, window, filled


@dataclasses.dataclass
class Problem:
    """One shape with its data; keys and values lie as [B, K, S, D], the layout of a cache."""

    name: str
    heads: tuple[int, int]
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.B, self.L, self.S, self.D, self.window, self.filled = sizes_of(self.name)
        H, self.K = self.heads
        self.R = H // self.K
        make = lambda *shape: torch.randn(*shape, self.D, device=self.device, dtype=self.dtype)  # noqa: E731
        self.q = make(self.B, self.L, self.K, self.R)
        self.k, self.v = (make(self.B, self.K, self.S).transpose(1, 2) for _ in range(2))
        self.keywords: dict[str, Any] = {"scale": self.D**-0.5}
        if self.L > 1 or self.window is not None:
            self.keywords["band_hi"] = self.S - self.L
        if self.window is not None:
            self.keywords["band_lo"] = self.S - self.L - self.window + 1
        if self.filled is not None:
            seen = torch.arange(self.S, device=self.device) < self.filled
            self.keywords["key_mask"] = seen[None].expand(self.B, -1)

    @functools.cached_property
    def hidden(self) -> torch.Tensor:
        """True where query i does not see key j, [L, S]."""
        j = torch.arange(self.S, device=self.device)[None, :]
        i = torch.arange(self.L, device=self.device)[:, None] + self.S - self.L
        hidden = j > i
        if self.window is not None:
            hidden = hidden | (j <= i - self.window)
        if self.filled is not None:
            hidden = hidden | (j >= self.filled)
        return hidden

    @functools.cached_property
    def reach(self) -> tuple[int, int]:
        """The first key that any query sees, and the one behind the last."""
        seen = (~self.hidden).any(0).nonzero()
        return int(seen.min()), int(seen.max()) + 1

    @property
    def bytes_read(self) -> int:
        """Keys and values that any query sees."""
        lo, hi = self.reach
        return 2 * self.B * self.K * (hi - lo) * self.D * self.dtype.itemsize

    def computed(self, dtype: torch.dtype) -> Results:
        """out_BLKRD and base-2 lse_BKRL, computed in `dtype` (scores after their rounding in fp32),
        one key head at a time."""
        out = torch.empty_like(self.q, dtype=torch.float64)
        lse = out.new_empty(self.B, self.K, self.R, self.L)
        for b in range(self.B):
            for k in range(self.K):
                q, keys, values = (x[b, :, k].to(dtype) for x in (self.q, self.k, self.v))
                s = torch.einsum("lrd,sd->rls", q, keys) * self.keywords["scale"]
                s = s.to(torch.promote_types(dtype, torch.float32))
                s = s.masked_fill(self.hidden, -math.inf)
                p = torch.softmax(s, -1).to(dtype)
                out[b, :, k] = torch.einsum("rls,sd->lrd", p, values)
                lse[b, k] = torch.logsumexp(s, -1) / math.log(2)
        return out, lse

    @functools.cached_property
    def allowed(self) -> tuple[Results, list[float]]:
        """What is true, and by how much each result may differ: twice eager's largest error, or an
        ulp of the largest value."""
        true, near = self.computed(torch.float64), self.computed(self.dtype)
        limits: list[float] = []
        for exact, eager, dtype in zip(true, near, (self.dtype, torch.float32), strict=True):
            floor = torch.finfo(dtype).eps * float(exact.abs().max())
            limits.append(max(2 * float((eager - exact).abs().max()), floor))
        return true, limits

    def wrong(self, results: Results) -> list[str]:
        """One sentence for each result that is further off than allowed; peers give no lse."""
        true, limits = self.allowed
        found: list[str] = []
        for name, x, exact, limit in zip(("out", "lse"), results, true, limits, strict=False):
            error = float((x.double().reshape(exact.shape) - exact).abs().max())
            if not error <= limit:
                found.append(f"{name}: error is {error:.2e}, allowed {limit:.2e}")
        return found
