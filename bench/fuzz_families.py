"""Random attentions in families: what a kernel is compiled for is drawn once a family, lengths,
batch and numbers for each example.

Triton compiles anew where an integer becomes 1 or stops being a multiple of 16, strides included.
So lengths of one family share their greatest divisor with 16; then so do all products of them.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch
from kernels.oracle import Case

from fuzz_memory import Memory

ROUTES = ("plain", "chosen", "decode", "weights", "given", "op", "sm90")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKS = (
    "none", "causal", "offset", "window", "padded", "padded window", "mask", "mask causal", "bias",
    "bias offset", "lowest bias", "exact", "exact padded",
)  # fmt: skip
ROTATIONS = ("none", "half", "interleaved", "partial", "partial interleaved", "only k")
NEEDS = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)][:-1]
LAYOUTS = ("contiguous", "heads first", "sliced", "strided lanes", "expanded", "turned", "shifted")
GROUPS = (1, 1, 2, 3, 4, 5, 8, 16)  # query heads a key head
FEW_GROUPS = (1, 1, 2, 2, 3, 4)  # the interpreter pays for each head
LOWEST = torch.finfo(torch.float32).min


@dataclasses.dataclass(frozen=True)
class Family:
    """What the examples of one family have in common. `sizes` are B, L and S of its model."""

    index: int
    route: str
    dtype: torch.dtype
    sizes: tuple[int, int, int]
    is_square: bool
    K: int
    R: int
    D: int
    E: int
    mask: str
    flat: tuple[int, ...]  # dims of a mask, bias or dropout that broadcast
    fill: float
    fill_adds: bool
    softcap: float
    has_sink: bool
    has_keep: bool
    rotation: str
    tables: torch.dtype
    layouts: tuple[str, str, str, str]  # of q, k, v, grad_out
    needs: tuple[bool, bool, bool]
    splits: int | None
    by_box: bool  # descriptors in decode, packed gradients from given weights
    is_interpreted: bool

    @property
    def has_backward(self) -> bool:
        return self.route in ("plain", "chosen", "op", "sm90")


def family(seed: int, index: int, is_interpreted: bool) -> Family:
    """The family with this number; its route follows from the number, all else from the seed."""
    draw = random.Random(f"{seed}/{index}")
    one = draw.choice
    route = ROUTES[index % len(ROUTES)]
    if is_interpreted and route == "sm90":
        route = "op"
    widths = (16, 24, 32, 40) if is_interpreted else (16, 32, 40, 64, 64, 72, 80, 96, 112, 128, 128)
    widths += () if is_interpreted else (160, 192, 256)
    D = one(widths)
    E = D if draw.random() < 0.6 else one(widths)
    R = one(FEW_GROUPS if is_interpreted and draw.random() < 0.8 else GROUPS)
    K = one((1, 2, 3)) if R < 3 or (R < 5 and not is_interpreted) else 1
    longest = _longest(route, R * K, is_interpreted)
    L, S = draw.randint(1, longest[0]), draw.randint(1, longest[1])
    is_square = L == S or (route != "decode" and draw.random() < 0.4)
    mask = one(MASKS)
    if route in ("weights", "given"):
        mask = one(MASKS) if route == "weights" else "none"
    is_plain = draw.random() < 0.4  # layouts that no copy is needed for
    layouts = [one(LAYOUTS[:2] if is_plain else LAYOUTS) for _ in range(4)]
    fills = (-math.inf, LOWEST) if "exact" not in mask else (-1e4, -1e9)
    made = Family(
        index=index,
        route=route,
        dtype=one(DTYPES),
        sizes=(one((1, 2) if is_interpreted else (1, 2, 3)), L, L if is_square else S),
        is_square=is_square,
        K=K,
        R=R,
        D=D,
        E=E,
        mask=mask,
        flat=tuple(dim for dim in range(4) if draw.random() < 0.4),
        fill=one(fills),
        fill_adds=draw.random() < 0.5,
        softcap=0.0 if route == "weights" else one((0.0, 0.0, 2.0, 30.0)),
        has_sink=route != "weights" and draw.random() < 0.25,
        has_keep=route != "weights" and draw.random() < 0.25,
        rotation=one(ROTATIONS),
        tables=one((torch.float32, torch.bfloat16)),
        layouts=(layouts[0], layouts[1], layouts[2], layouts[3]),
        needs=one(NEEDS) if draw.random() < 0.5 else (True, True, True),
        splits=one((None, 1, 2, 3) if is_interpreted else (None, 1, 2, 3, 7, 20)),
        by_box=draw.random() < 0.5,
        is_interpreted=is_interpreted,
    )
    return _for_sm90(made, draw) if route == "sm90" else made


def _for_sm90(of: Family, draw: random.Random) -> Family:
    """What the kernels for sm_90 take, which chance alone hardly ever draws; not all of it has
    their backward."""
    one = draw.choice
    D = one((64, 64, 128, 128, 128, 256))
    masks = ("none", "causal", "offset") + (
        ("window", "padded", "padded window") if D < 256 else ()
    )
    return dataclasses.replace(
        of,
        dtype=one(DTYPES[:2]),
        D=D,
        E=D,
        mask=one(masks),
        softcap=0.0,
        has_sink=False,
        has_keep=False,
        layouts=tuple(one(LAYOUTS[:3]) for _ in range(4)),
        needs=(True, True, True),
    )


def _longest(route: str, heads: int, is_interpreted: bool) -> tuple[int, int]:
    """Of queries and of keys. The interpreter pays for each program, the reference for scores."""
    if is_interpreted:
        if route == "op":  # the fused CPU attention begins at 256 x 256 scores
            return (300, 300) if heads <= 2 else (60, 60)
        return (4, 40) if route == "decode" else (max(5, 40 // heads), 33)
    if route == "decode":
        return 24, 1500
    longest = 400 if heads <= 4 else 200
    return longest, longest


def like(model: int, longest: int, draw: random.Random) -> int:
    """Another length for which the same kernel is compiled."""
    if model == 1:
        return 1
    unit = math.gcd(model, 16)
    if unit == 16:
        return 16 * draw.randint(1, max(1, longest // 16))
    found = unit * (1 + 2 * draw.randint(0, max(0, (longest // unit - 1) // 2)))
    return found if found > 1 else 3


def near(number: int, model: int) -> int:
    """The number, or one close to it that Triton takes for one of the model's kind."""
    if model % 16 == 0:
        return round(number / 16) * 16
    if model == 1:
        return 1
    return number if number % 16 and number != 1 else number + (1 if number % 16 == 0 else 2)


class Example:
    """One attention of a family, its tensors in `memory`. `again`: other values, all else equal."""

    def __init__(
        self, of: Family, seed: int, number: int, device: torch.device, again: int = 0
    ) -> None:
        self.family, self.memory = of, Memory(device)
        self.draw = random.Random(f"{seed}/{of.index}/{number}")
        self.random = torch.Generator(device).manual_seed(self.draw.getrandbits(40) + again)
        longest = _longest(of.route, of.K * of.R, of.is_interpreted)
        B, L, S = of.sizes
        self.B = B if B == 2 else like(B, 3, self.draw)
        self.L = like(L, longest[0], self.draw)
        self.S = self.L if of.is_square else like(S, longest[1], self.draw)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(*shape, generator=self.random, device=self.memory.device)
        return made.to(dtype or self.family.dtype)

    def coin(self, *shape: int, p: float) -> torch.Tensor:
        return torch.rand(*shape, generator=self.random, device=self.memory.device) < p

    def laid(self, x: torch.Tensor, layout: str) -> torch.Tensor:
        """x [batch, positions, heads.., lanes] in one of LAYOUTS."""
        natural = tuple(range(x.dim()))
        heads = natural[2:-1]
        if layout == "heads first":
            return self.memory.placed(x, (0, *heads, 1, natural[-1]))
        if layout == "turned":  # the positions of a lane follow each other
            return self.memory.placed(x, (0, *heads, natural[-1], 1))
        if layout == "sliced":
            return self.memory.placed(x, natural, gap=8)
        if layout == "strided lanes":
            return self.memory.placed(x, natural, step=2)
        if layout == "expanded":
            return self.memory.placed(x, natural, flat=(0,))
        return self.memory.placed(x, natural, offset=1 if layout == "shifted" else 0)

    def scored(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, K, R, L, S] as it broadcasts in this family."""
        return self.memory.placed(x, range(5), flat=self.family.flat)

    def case(self) -> Case:
        """The attention as the launchers take it."""
        of, B, L, S, K, R = self.family, self.B, self.L, self.S, self.family.K, self.family.R
        keywords = {"scale": self.draw.choice((of.D**-0.5, 1.0)) if of.index % 5 else -0.5}
        keywords |= self.masked() | self.rotated()
        if of.softcap:
            keywords["softcap"] = of.softcap
        if of.has_sink:
            sink = self.normal(K, R, dtype=torch.float32)
            keywords["sink"] = self.memory.placed(sink, (0, 1))
        if of.has_keep:
            kept = self.scored(self.coin(B, K, R, L, S, p=0.8))
            keywords |= {"keep": kept, "keep_scale": 1 / 0.8}
        shapes = ((B, L, K, R, of.D), (B, S, K, of.D), (B, S, K, of.E), (B, L, K, R, of.E))
        made = [
            self.laid(self.normal(*shape), layout)
            for shape, layout in zip(shapes, of.layouts, strict=True)
        ]
        return Case(made[0], made[1], made[2], keywords, made[3] if of.has_backward else None)

    def masked(self) -> dict[str, Any]:
        """The keywords that hide scores or are added to them."""
        of, B, L, S, K, R = self.family, self.B, self.L, self.S, self.family.K, self.family.R
        words = of.mask.split()
        found: dict[str, Any] = {}
        model = of.sizes[2] - of.sizes[1]
        if "causal" in words:
            found["band_hi"] = 0
        if "offset" in words or "window" in words:
            found["band_hi"] = near(S - L, model)
        if "window" in words:
            found["band_lo"] = near(found["band_hi"] - self.draw.randint(0, 60), model - 7)
        if "padded" in words:
            seen = self.coin(B, S, p=0.7)
            seen[0] = seen[0] & (self.draw.random() < 0.5)
            found["key_mask"] = self.memory.placed(seen, (0, 1))
        if "mask" in words:
            found["mask"] = self.scored(self.coin(B, K, R, L, S, p=0.3))
        if of.mask in ("bias", "bias offset"):
            hidden = self.coin(B, K, R, L, S, p=0.3)
            hidden[..., 0] = False
            found["bias"] = self.scored(self.normal(B, K, R, L, S).masked_fill(hidden, -math.inf))
        if of.mask == "lowest bias":  # rows that are wholly hidden: eager spreads them evenly
            bias = self.normal(B, K, R, L, S, dtype=torch.float32)
            bias[..., self.draw.randrange(L), :] = LOWEST
            found["bias"] = self.scored(bias)
        if "exact" in words:
            found["band_hi"] = near(self.draw.choice((-2, 3, 5)), 3)
        if set(words) & {"causal", "offset", "window", "padded", "mask", "exact"}:
            found |= {"fill": of.fill, "fill_adds": of.fill_adds}
        return found

    def rotated(self) -> dict[str, Any]:
        """Tables whose columns are all independent, in whole or for a part of the lanes."""
        of = self.family
        if of.rotation == "none":
            return {}
        is_partial = "partial" in of.rotation
        W = of.D // 4 * 2 if is_partial else of.D
        names = ("cos_k", "sin_k") if of.rotation == "only k" else ("cos_q", "sin_q") * 2
        names = names[:2] if of.rotation == "only k" else ("cos_q", "sin_q", "cos_k", "sin_k")
        length = {"q": self.L, "k": self.S}
        found: dict[str, Any] = {}
        for name in names:
            table = self.normal(self.B, length[name[-1]], W, dtype=torch.float32).cos()
            flat = (0,) if of.index % 3 else ()
            found[name] = self.memory.placed(table.to(of.tables), (0, 1, 2), flat=flat)
        start = 4 if is_partial and of.index % 2 else 0
        return found | {"rope_interleaved": "interleaved" in of.rotation, "rope_start": start}
