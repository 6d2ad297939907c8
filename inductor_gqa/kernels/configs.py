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
# fp32 operands are rounded or taken apart in registers on their way to the tensor cores: from D =
# 128 on only small tiles fit. Four warps on a tile of 32 rows each hold other operands; of eight,
# half compute what the other half does.
TF32 = {
    64: Config(Tiles(64, 64, 4, 3), Tiles(32, 32, 4, 2), Tiles(64, 32, 4, 2)),
    96: Config(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), splits_keys=True),
    128: Config(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), splits_keys=True),
    256: Config(Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), splits_keys=True),
}
# The fastest of those measured (H200, causal, lengths 512 and 2048), which keep a part outside of
# registers: see tests/kernels/test_compile_only.py. Tiles that keep none take 1.3 times as long at
# D = 64.
IEEE = {
    64: Config(Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 64, 4, 1)),
    128: Config(Tiles(64, 32, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 4, 1), splits_keys=True),
    256: Config(Tiles(32, 32, 4, 1), Tiles(64, 32, 8, 1), Tiles(16, 32, 4, 1), splits_keys=True),
}
# Query rows of all heads below which half as many in a tile end sooner: more multiprocessors work.
FEW_ROWS = 2**15
IEEE_FEW_ROWS = {
    64: IEEE[64],
    128: IEEE[128]._replace(forward=Tiles(32, 32, 4, 2), queries=Tiles(32, 32, 4, 1)),
    256: IEEE[256]._replace(forward=Tiles(16, 32, 4, 2)),
}
# Not measured: tiles that keep little or nothing outside (up to 64 lanes 24 bytes a thread, else up
# to 96).
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
    D: int,
    E: int,
    rows: int,
    dtype: torch.dtype,
    capability: Capability,
    path: Path,
    precision: str,
) -> Config:
    """Tiles for one attention of so many query rows, B K R L; capability None means the
    interpreter."""
    if capability is None:
        return INTERPRETED
    width = 64 if max(D, E) <= 64 else 128 if max(D, E) <= 128 else 256
    if dtype == torch.float32:
        if capability[0] != 9:
            return FP32_ELSEWHERE[precision][width]
        if precision == "ieee":
            return (IEEE_FEW_ROWS if rows < FEW_ROWS else IEEE)[width]
        # Between 64 and 128 lanes lie in two chunks of unequal width.
        return TF32[96 if 64 < max(D, E) < 128 else width]
    if capability < (9, 0):
        return AMPERE[width]
    if capability >= (10, 0) and path == "descriptors":
        return BLACKWELL_DESCRIPTORS[width]
    return (HOPPER_DESCRIPTORS if path == "descriptors" else HOPPER_POINTERS)[width]
