"""RoPE and attention of one shape: the data of bench/attention.py and what is true for it."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

Results = dict[str, torch.Tensor]
NAMES = ("out", "lse", "dq", "dk", "dv")
ROWS = 2048  # of scores at a time
THETA = 500000.0


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in halves, as models write it; tables broadcast to x."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def turned_back(g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The adjoint of `turned`."""
    first, second = (g * sin).chunk(2, -1)
    return g * cos + torch.cat((second, -first), -1)


@dataclasses.dataclass
class Problem:
    """Projections as [B, S, heads, D], tables as [1, S, D], unused without RoPE. Heads are [K, R]
    for ours; the same storage serves the peers as [H]."""

    B: int
    S: int
    D: int
    is_causal: bool
    heads: tuple[int, int]
    device: torch.device
    dtype: torch.dtype
    has_rope: bool = True

    def __post_init__(self) -> None:
        H, self.K = self.heads
        self.R = H // self.K

        def normal(*heads: int) -> torch.Tensor:
            shape = (self.B, self.S, *heads, self.D)
            return torch.randn(shape, device=self.device, dtype=self.dtype)

        self.q, self.grad_out = normal(self.K, self.R), normal(self.K, self.R)
        self.k, self.v = normal(self.K), normal(self.K)
        self.scale = self.D**-0.5
        lanes = torch.arange(0, self.D, 2, device=self.device) / self.D
        angles = torch.arange(self.S, device=self.device)[:, None] * THETA**-lanes
        angles = torch.cat((angles, angles), -1)[None]
        self.tables = (angles.cos().to(self.dtype), angles.sin().to(self.dtype))

    @property
    def name(self) -> str:
        return f"D{self.D}-S{self.S}-{'causal' if self.is_causal else 'none'}"

    def operations(self, has_backward: bool) -> float:
        """Of the matmuls: two forward, five more backward; half of them when causal."""
        H = self.heads[0]
        forward = 4.0 * self.B * H * self.S**2 * self.D * (0.5 if self.is_causal else 1.0)
        return forward * (3.5 if has_backward else 1.0)

    def leaves(self) -> list[torch.Tensor]:
        """q, k, v as [B, S, H, D], for autograd."""
        inputs = (self.q.flatten(2, 3), self.k, self.v)
        return [x.detach().requires_grad_() for x in inputs]

    def computed(self, b: int, k: int, dtype: torch.dtype) -> Results:
        """All results of one key head as eager computes them in `dtype`, some rows at a time: out,
        dq [R, S, D], dk, dv [S, D], lse [R, S] in base 2."""
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = (x[0].to(dtype) for x in self.tables)
        q, g = (x[b, :, k].to(dtype).transpose(0, 1) for x in (self.q, self.grad_out))
        keys, values = self.k[b, :, k].to(dtype), self.v[b, :, k].to(dtype)
        if self.has_rope:
            q, keys = turned(q, cos, sin), turned(keys, cos, sin)
        out, dq = torch.empty_like(q), torch.empty_like(q)
        lse = torch.empty(self.R, self.S, device=self.device, dtype=wide)
        dk, dv = (torch.zeros_like(keys, dtype=wide) for _ in range(2))
        column = torch.arange(self.S, device=self.device)[None]
        for r in range(self.R):
            for lo in range(0, self.S, ROWS):
                part = slice(lo, min(lo + ROWS, self.S))
                s = (q[r, part] @ keys.T * self.scale).to(wide)
                if self.is_causal:
                    row = torch.arange(part.start, part.stop, device=self.device)[:, None]
                    s.masked_fill_(column > row, -math.inf)
                lse[r, part] = torch.logsumexp(s, -1) / math.log(2)
                p = torch.softmax(s, -1)
                out[r, part] = p.to(dtype) @ values
                dp = (g[r, part] @ values.T).to(wide)
                ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * self.scale
                dq[r, part] = ds.to(dtype) @ keys
                dk += ds.to(dtype).T @ q[r, part]
                dv += p.to(dtype).T @ g[r, part]
        dk = dk.to(dtype)
        if self.has_rope:
            dq, dk = turned_back(dq, cos, sin), turned_back(dk, cos, sin)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv.to(dtype)}

    def group(self, results: Results, b: int, k: int) -> Results:
        """The same key head of a variant's results."""
        part: Results = {}
        for name, x in results.items():
            if name in ("out", "dq"):
                part[name] = x.reshape(self.q.shape)[b, :, k].transpose(0, 1)
            elif name == "lse":
                part[name] = x.reshape(self.B, self.K, self.R, self.S)[b, k]
            else:
                part[name] = x[b, :, k]
        return part

    @functools.cached_property
    def known(self) -> tuple[dict[tuple[int, int], Results], dict[str, float]]:
        """What is true of the first and the last key head, and by how much each result may differ:
        twice eager's largest error, or what rounding explains: an ulp of the largest value, in fp32
        eight, because a backward rebuilds the weights from a logarithm in fp32."""
        groups = sorted({(0, 0), (self.B - 1, self.K - 1)})
        true = {at: self.computed(*at, torch.float64) for at in groups}
        limits: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        roundings = max(torch.finfo(self.dtype).eps, 8 * torch.finfo(torch.float32).eps)
        for at, exact in true.items():
            eager = self.computed(*at, self.dtype)
            for name in NAMES:
                error = float((eager[name].double() - exact[name]).abs().max())
                floor = roundings * float(exact[name].abs().max())
                limits[name] = max(limits[name], 2 * error, floor)
        return true, limits

    def wrong(self, results: Results) -> list[str]:
        """One sentence for each result that is further off than allowed."""
        true, limits = self.known
        found: list[str] = []
        for name in results:
            errors = [
                float(
                    (self.group({name: results[name]}, *at)[name].double() - exact[name])
                    .abs()
                    .max()
                )
                for at, exact in true.items()
            ]
            if not all(error <= limits[name] for error in errors):
                worst = max(error if error == error else math.inf for error in errors)
                found.append(f"{name}: error is {worst:.2e}, allowed {limits[name]:.2e}")
        return found
