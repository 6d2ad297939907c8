"""Whether a site that was read is replaced: what the kernels can do, and what pays on the device at
hand.

The size from which fusing pays on a GPU is the least that was measured against plain compile:
blocks of length 128 (bench/results, seeds and block; one H200). On the CPU it is an estimate.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from .patterns.axes import product
from .patterns.given import Given
from .site import Site

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
CAPABILITY = (8, 0)  # bf16, and the asynchronous copies that the kernels are built on

# Fewest scores per head (query length times key length) from which fusing pays, by device type; see
# above.
SMALLEST = {"cuda": 128 * 128, "cpu": 512 * 512}
UNKNOWN = 1 << 30  # a size of which nothing is known: large enough to fuse


# fp32 without returned weights: widest heads of which the kernels were measured to be no slower
# than plain compile (one H200 under steady load, 16/4 heads, 4 x 512, 2048 and 4096 tokens,
# 2026-12-03), by precision of matmuls, whether it trains and whether a band hides keys, which plain
# compile computes all the same. A training step with a causal mask is 1.7 to 1.9 times as fast up
# to 64 lanes and 1.2 to 1.4 times up to 128 ("ieee"; of 256 lanes 0.7), for "tf32" 1.3 to 1.5 times
# up to 64 (of 128 lanes 0.6 to 0.7). Without one it is 0.3 to 1.0 times as fast for "ieee" and, at
# length 512, 0.5 to 0.9 times for "tf32" (longer ones 1.3 to 1.8). Forwards are 1.1 to 4.2 times as
# fast but for "ieee" of 256 lanes without a band, 0.8 to 0.9; "tf32" of 256 was not measured.
WIDEST_FP32 = {
    ("ieee", True, True): 128,
    ("ieee", True, False): 0,
    ("ieee", False, True): MAX_HEAD_DIM,
    ("ieee", False, False): 128,
    ("tf32", True, True): 64,
    ("tf32", True, False): 0,
    ("tf32", False, True): MAX_HEAD_DIM,
    ("tf32", False, False): MAX_HEAD_DIM,
}

# A call of F.scaled_dot_product_attention is a fused kernel already. Least lengths by head dim from
# which ours was measured to be faster, within Llama training steps beside the same model with such
# calls (bench/results; one H200, bf16, causal, rotation inside). A step took 116 against 132 ms at
# head dim 128 and length 4096, and at head dim 64 107 against 117 ms (length 1024) and 251 against
# 328 ms (4096); its forward part 39 against 46 and 36 against 41.
# Transformers gives these calls their causal mask as a tensor, which costs them; calls that only
# say is_causal were not measured. Beyond these lengths, and for inference proper, it is an
# estimate; elsewhere only enable(always=True) fuses.
SDPA_TRAINING = {64: 1024, 128: 4096}
SDPA_INFERENCE = {64: 1024, 128: 4096}
SDPA_CAPABILITY = (9, 0)
# Gradients of linear layers that share their input, computed together where that was measured to be
# faster than separate matmuls (bench/results/layers-h200.json; one H200, 768 to 5120 columns): by
# layers in one op, fewest and most tokens, and how full the last of the tiles of 128 must make
# them. Three layers gain 0 to 170%, the most where there are few tokens; one alone gains 1 to 38%,
# and lost in most of what is left.
JOINED = {1: (128, 3072, 0.9), 2: (64, 8192, 0.0), 3: (64, 8192, 0.0)}
JOINED_LAYERS = max(JOINED)
JOINED_LEAST = 768 * 768  # elements of all weights
JOINED_ALONE = 1024, 2048 * 2048  # beyond these tokens a layer alone must have so many elements
JOINED_CAPABILITY = (9, 0)
JOINED_DTYPES = (torch.bfloat16, torch.float16)
# Linear layers of fp32 around a fused site, with one input, computed together where that was
# measured to be faster than matmuls (bench/results/layers-forward-*-h200.json; one H200, 768 to
# 4096 columns): by precision and layers in one op, fewest and most tokens. "ieee" takes 33 to 92%
# of the time of matmuls, "tf32" 51 to 95% where weights are small.
JOINED_FORWARD = {
    "ieee": {1: (128, 16384), 2: (64, 16384), 3: (64, 16384)},
    "tf32": {2: (64, 512), 3: (64, 2048)},
}
JOINED_FORWARD_LAYERS = 3
JOINED_FORWARD_SIZES = {"ieee": (2**20, 2**26), "tf32": (2**20, 2**21)}  # elements of all weights


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
    factor = site.scale_tensor
    if factor is not None and factor.meta["val"].device.type != "cpu":
        return f"the scale is a tensor on {device.type}, accepted a number or a tensor on the CPU"
    return _unusable(device) if device.type == "cuda" else None


def _unusable(device: torch.device) -> str | None:
    """Why no kernel of ours runs on this GPU, or None."""
    if torch.version.hip is not None:
        return "the GPU is one of AMD's, accepted NVIDIA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        seen, least = (".".join(map(str, c)) for c in (capability, CAPABILITY))
        return f"compute capability is {seen}, accepted {least} or higher"
    return _broken_kernels()


@functools.cache
def _broken_kernels() -> str | None:
    try:
        importlib.import_module("inductor_gqa.kernels.choice")
    except Exception as why:
        return f"Triton is broken, importing the kernels raises {why!r}"
    return None


def unpackaged() -> str | None:
    """Why an AOTInductor package should not call our ops, or None where none is made: they are
    implemented in Python, and whoever loads the package would have to import them first."""
    from torch._inductor.virtualized import V

    if V.aot_compilation is not True:
        return None
    return (
        "AOTInductor makes a package, accepted with enable(always=True), "
        "if whoever loads it imports inductor_gqa.ops first"
    )


def unprofitable(site: Site | Given, precision: str) -> str | None:
    """Why fusing would not pay, or None; symbolic lengths are judged by the sizes that were seen
    first, and matmuls of fp32 run at the precision "ieee" or "tf32"."""
    device = site.anchor.meta["val"].device
    if isinstance(site, Site) and site.is_sdpa:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return call_unprofitable(site, device.type, capability)
    scores = hint(product((site.query_length, site.key_length)))
    least = SMALLEST[device.type]
    if scores < least:
        return f"scores per head are {scores}, accepted {least} or more on {device.type} ({ALL})"
    if device.type != "cuda" or not isinstance(site, Site) or site.weights:
        return None
    return fp32_unprofitable(site, precision)


def fp32_unprofitable(site: Site, precision: str) -> str | None:
    """Why an attention on a GPU had better stay the matmuls that it is, or None: those of fp32 are
    about as fast as ours, and a backward of ours computes the scores again."""
    if site.q.dtype is not torch.float32:
        return None
    has_band = site.mask.band_hi is not None or site.mask.band_lo is not None
    training = site.gradients is not None
    widest = WIDEST_FP32[precision, training, has_band]
    seen = max(site.head_dim, site.value_dim)
    if seen <= widest:
        return None
    mode = "training" if training else "inference"
    mask = "with" if has_band else "without"
    accepted = f"up to {widest}" if widest else "none"
    setting = "highest" if precision == "ieee" else "high"
    where = f"fp32 {mode} {mask} a causal mask or window at matmul precision {setting!r}"
    return f"head dim {seen} in {where}, accepted {accepted} ({ALL})"


def joins(weights: list[torch.fx.Node], x: torch.fx.Node) -> bool:
    """Whether the gradients of layers of these weights [N_i, C] with the one input [T, C] are
    computed together."""
    value = x.meta["val"]
    if value.device.type != "cuda" or value.dtype not in JOINED_DTYPES:
        return False
    if torch.cuda.get_device_capability(value.device) != JOINED_CAPABILITY:
        return False
    if _unusable(value.device) is not None:
        return False
    tokens, columns = (int(n) for n in value.shape)
    fewest, most, full = JOINED[len(weights)]
    elements = columns * sum(int(weight.meta["val"].shape[0]) for weight in weights)
    is_full = tokens >= full * 128 * -(-tokens // 128)
    few, many = JOINED_ALONE
    if len(weights) == 1 and tokens > few and elements < many:
        return False
    return elements >= JOINED_LEAST and fewest <= tokens <= most and is_full


def joins_forward(weights: list[torch.fx.Node], x: torch.fx.Node, precision: str) -> bool:
    """Whether layers of these weights, given as [C, N_i], with the one input [T, C] are computed
    together, in fp32 of the given precision."""
    value = x.meta["val"]
    if value.device.type != "cuda" or value.dtype is not torch.float32:
        return False
    if torch.cuda.get_device_capability(value.device) != JOINED_CAPABILITY:
        return False
    if _unusable(value.device) is not None:
        return False
    fewest, most = JOINED_FORWARD[precision].get(len(weights), (1, 0))
    least, largest = JOINED_FORWARD_SIZES[precision]
    tokens, columns = (int(n) for n in value.shape)
    widths = [int(weight.meta["val"].shape[1]) for weight in weights]
    is_measured = all(n % 4 == 0 for n in (columns, *widths))  # others take another kernel
    elements = columns * sum(widths)
    return is_measured and fewest <= tokens <= most and least <= elements <= largest


ALL = "enable(always=True) fuses all"


def call_unprofitable(site: Site, device: str, capability: tuple[int, int] | None) -> str | None:
    """Why a call of F.scaled_dot_product_attention had better stay the fused kernel that it is, or
    None."""
    call = f"a scaled_dot_product_attention call on {device}"
    if device == "cpu":
        return f"{call} is PyTorch's fused attention, which ours is too, accepted on cuda ({ALL})"
    training = site.gradients is not None
    table = SDPA_TRAINING if training else SDPA_INFERENCE
    lengths = [hint(n) for n in (site.query_length, site.key_length)]
    least = table.get(site.head_dim)
    mask, where = site.mask, f"accepted where ours was measured to be faster ({ALL})"
    if capability != SDPA_CAPABILITY:
        return f"{call} of compute capability {capability}, accepted {SDPA_CAPABILITY} ({ALL})"
    if site.q.dtype is not torch.bfloat16:
        return f"{call} in {site.q.dtype}, accepted torch.bfloat16 ({ALL})"
    if site.rotate_q is None or site.rotate_k is None:
        return f"{call} without RoPE inside, {where}"
    if not site.sdpa_has_mask:
        return f"{call} that is given no mask tensor, {where}"
    if mask.keys or mask.tensors or mask.bias or mask.band_hi is None:
        return f"{call} with a mask that is not causal or a band, {where}"
    if least is None or min(lengths) < least:
        mode = "training" if training else "inference"
        seen = f"head dim {site.head_dim} and lengths {lengths[0]} and {lengths[1]} in {mode}"
        known = ", ".join(f"head dim {d} from length {n}" for d, n in table.items())
        return f"{call} has {seen}, accepted {known} ({ALL})"
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
