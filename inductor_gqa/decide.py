"""Whether a site that was read is replaced: what the kernels can do, and what pays on the device at
hand.

The sizes from which fusing pays are estimates so far: against plain compile it was measured at one
size only (a Llama training step of length 1024 on one H200, bench/results), never near the
thresholds and not on the CPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from .patterns.axes import product
from .patterns.given import Given
from .site import Site

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256

# Fewest scores per head (query length times key length) from which fusing pays, by device type.
# Estimates, see above.
SMALLEST = {"cuda": 128 * 128, "cpu": 512 * 512}
UNKNOWN = 1 << 30  # a size of which nothing is known: large enough to fuse


def unsupported(site: Site | Given) -> str | None:
    """Why the kernels cannot compute the site, or None."""
    device = site.anchor.meta["val"].device
    dtypes = {view.dtype for view in (site.q, site.k, site.v) if view is not None}
    if device.type not in SMALLEST:
        return f"device is {device.type}, accepted {' and '.join(sorted(SMALLEST))}"
    if not dtypes <= set(DTYPES) and not (device.type == "cpu" and dtypes == {torch.float64}):
        return f"dtypes are {sorted(map(str, dtypes))}, accepted fp16, bf16 and fp32"
    for name, dim in (("head dim", site.head_dim), ("value dim", site.value_dim)):
        if device.type == "cuda" and (dim > MAX_HEAD_DIM or dim % 8 or dim < 16):
            return f"{name} is {dim}, accepted multiples of 8 from 16 to {MAX_HEAD_DIM}"
    if (
        isinstance(site, Site)
        and site.scale_tensor is not None
        and site.scale_tensor.meta["val"].device.type != "cpu"
    ):
        return f"the scale is a tensor on {device.type}, accepted a number or a tensor on the CPU"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def unprofitable(site: Site | Given) -> str | None:
    """Why fusing would not pay, or None; symbolic lengths are judged by the sizes that were seen
    first."""
    device = site.anchor.meta["val"].device.type
    scores = hint(product((site.query_length, site.key_length)))
    least = SMALLEST[device]
    if scores < least:
        why = "enable(always=True) fuses all"
        return f"scores per head are {scores}, accepted {least} or more on {device} ({why})"
    return None


def hint(size: Any) -> int:
    """A size as a number: itself, or what a symbolic size was when the graph was traced."""
    if isinstance(size, int):
        return size
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    env = context.fake_mode.shape_env if context and context.fake_mode else None
    if env is None:
        return UNKNOWN
    try:
        # The lookup has moved between releases: the second name warns from 2.13 on.
        look_up = getattr(env, "guarding_hint_or_throw", None) or env.size_hint
        return int(look_up(size))  # type: ignore[arg-type]
    except Exception:
        return UNKNOWN
