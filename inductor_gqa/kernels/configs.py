"""Tile sizes, warps and stages: a pure function of what a kernel will hold on chip.

Measured on an H200 with Triton 3.6 and bf16 (32/8 heads, D = 64 and 128): 64x64 tiles with four
warps win, because two or more programs share an SM and one computes exponentials while another
multiplies; 128x64 with eight warps is 10 to 20 % slower. The tiles of fp32 on sm_90 were measured
as well. All else is chosen by compiling for sm_80, sm_90 and sm_100: the largest tiles that neither
exceed shared memory nor spill in the cases of tests/kernels/test_compile_only.py.
"""

from typing import Literal, NamedTuple

import torch

Capability = tuple[int, int] | None
Path = Literal["descriptors", "pointers"]


class Tiles(NamedTuple):
    """BM query rows, BN keys, warps, pipeline stages."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


class Config(NamedTuple):
    """Tiles of the three kernels. `splits_keys`: dK and dV come from a launch each, because their
    fp32 accumulators do not fit the registers together."""

    forward: Tiles
    keys: Tiles
    queries: Tiles
    splits_keys: bool = False


# The interpreter pays per operation, not per element: small tiles let short tests cross many
# borders.
INTERPRETED = Config(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1))

# By the width class of max(D, E): up to 64, 128, 256.
HOPPER_DESCRIPTORS = {
    64: Config(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Config(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    256: Config(Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2), Tiles(64, 32, 8, 2), splits_keys=True),
}
HOPPER_POINTERS = {
    64: Config(Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Config(Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2)),
    256: Config(Tiles(64, 32, 4, 2), Tiles(16, 64, 8, 2), Tiles(64, 32, 8, 2), splits_keys=True),
}
BLACKWELL_DESCRIPTORS = {
    64: Config(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Config(Tiles(64, 64, 4, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 4, 2)),
    256: Config(Tiles(64, 64, 8, 2), Tiles(32, 32, 8, 2), Tiles(64, 32, 8, 2), splits_keys=True),
}
AMPERE = {
    64: Config(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    128: Config(Tiles(64, 64, 8, 2), Tiles(16, 64, 4, 2), Tiles(64, 32, 4, 2)),
    256: Config(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(64, 32, 8, 2), splits_keys=True),
}
# fp32 tiles live in registers on their way to the tensor cores, and three-product precision keeps
# a high and a low part of each: from D = 128 on only small tiles fit. Four warps on a tile of 32
# rows each hold other operands; of eight, half compute what the other half does.
TF32 = {
    64: Config(Tiles(64, 64, 4, 3), Tiles(32, 32, 4, 2), Tiles(64, 32, 4, 2)),
    96: Config(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), splits_keys=True),
    128: Config(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), splits_keys=True),
    256: Config(Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), splits_keys=True),
}
# Beyond D = 64 these keep up to 200 bytes a thread outside of registers, with a bias up to 264.
# Tiles that keep none or a few, as in FP32_ELSEWHERE, are slower (H200, causal, lengths 512, 2048).
IEEE = {
    64: Config(Tiles(64, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(64, 32, 4, 2)),
    96: Config(Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), splits_keys=True),
    128: Config(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), splits_keys=True),
    256: Config(Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), splits_keys=True),
}
# Not measured: tiles that keep little or nothing outside. On sm_80 and sm_100 the dot of three
# products keeps more in registers than on sm_90.
FP32_ELSEWHERE = {
    "tf32": {
        64: Config(Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2), Tiles(64, 32, 4, 2)),
        128: Config(
            Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), splits_keys=True
        ),
        256: Config(
            Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1), splits_keys=True
        ),
    },
    "ieee": {
        64: Config(Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
        128: Config(
            Tiles(32, 32, 8, 2), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), splits_keys=True
        ),
        256: Config(
            Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), splits_keys=True
        ),
    },
}


def config(
    D: int, E: int, dtype: torch.dtype, capability: Capability, path: Path, precision: str
) -> Config:
    """Tiles for one attention; capability None means the interpreter."""
    if capability is None:
        return INTERPRETED
    width = 64 if max(D, E) <= 64 else 128 if max(D, E) <= 128 else 256
    if dtype == torch.float32:
        if capability[0] != 9:
            return FP32_ELSEWHERE[precision][width]
        # Between 64 and 128 lanes lie in two chunks of unequal width.
        return (TF32 if precision == "tf32" else IEEE)[96 if 64 < max(D, E) < 128 else width]
    if capability < (9, 0):
        return AMPERE[width]
    if capability >= (10, 0) and path == "descriptors":
        return BLACKWELL_DESCRIPTORS[width]
    return (HOPPER_DESCRIPTORS if path == "descriptors" else HOPPER_POINTERS)[width]
