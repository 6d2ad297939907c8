"""What to launch for one attention, decided from shapes, strides, dtypes and capability alone.

A plan is plain data: tensors to allocate, then launches with flat keyword arguments that name
tensors by slot. `execute` runs it on real tensors; a compiler pass can turn the same plan into
graph nodes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from inductor_gqa.kernels import configs, rules
from inductor_gqa.reference import may_hide_a_row

# A fill at or below this swamps every score: softmax cannot tell such positions from hidden ones in
# a row that sees a key.
ABSORBING_FILL = -1e30
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Operand:
    """Everything a plan may know about a tensor. `is_aligned`: its first byte lies on a multiple of
    16."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_aligned: bool = True

    @classmethod
    def of(cls, x: torch.Tensor) -> "Operand":
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.data_ptr() % 16 == 0)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype, pitch: int = 0) -> "Operand":
        """Rows of the last dimension follow each other at `pitch` elements, default its size."""
        strides, step = [1], pitch or shape[-1]
        for size in reversed(shape[1:-1]):
            strides.append(step)
            step = step * size
        strides = [*strides, step] if len(shape) > 1 else strides
        return cls(tuple(shape), tuple(reversed(strides)), dtype)


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A tiled view of a slot for the tensor memory accelerator."""

    slot: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel call: `tensors` and `descriptors` map parameters to slots, `scalars` to numbers
    and constexprs. `is_early`: it may begin while the launch before it ends, for which the kernel
    waits itself."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: Mapping[str, str]
    scalars: Mapping[str, Any]
    num_warps: int
    num_stages: int
    descriptors: Mapping[str, Descriptor] = dataclasses.field(default_factory=dict)
    is_early: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        # Fusion is stated because the default changes with Triton's version, and the exponential's
        # argument must be one FMA.
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options["enable_fp_fusion"] = True
        return options | ({"launch_pdl": True} if self.is_early else {})


@dataclasses.dataclass(frozen=True)
class Plan:
    """`allocate` maps slots to tensors to create, `results` names the slots that are returned."""

    allocate: Mapping[str, Operand]
    launches: tuple[Launch, ...]
    results: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention without its data. `tensors` holds Operands by slot: q, k, v and whichever of
    cos_q, sin_q, cos_k, sin_k, bias, mask, key_mask, keep, sink (and grad_out, out, lse for a
    backward) are given."""

    tensors: Mapping[str, Operand]
    scale: float
    softcap: float = 0.0
    band_lo: int | None = None
    band_hi: int | None = None
    fill: float = float("-inf")
    fill_adds: bool = False
    rope_start: int = 0
    rope_interleaved: bool = False
    keep_scale: float = 1.0
    precision: str = "ieee"
    capability: tuple[int, int] | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, L, S, K, R, D, E."""
        B, L, K, R, D = self.tensors["q"].shape
        S, E = self.tensors["v"].shape[1], self.tensors["v"].shape[3]
        return B, L, S, K, R, D, E

    @property
    def dot_precision(self) -> str:
        return self.precision if self.tensors["q"].dtype == torch.float32 else "native"

    @property
    def has_descriptors(self) -> bool:
        """Whether the device has a tensor memory accelerator (sm_90 and later)."""
        return self.capability is not None and self.capability >= (9, 0)

    def config(self, path: configs.Path) -> configs.Config:
        B, L, _, K, R, D, E = self.sizes
        dtype = self.tensors["q"].dtype
        rows = B * K * R * L
        return configs.config(D, E, rows, dtype, self.capability, path, self.precision)

    @property
    def rules(self) -> int:
        has = self.tensors.__contains__
        is_exact = self.fill > ABSORBING_FILL
        is_absorbing = not is_exact and self.fill != float("-inf")
        hides = (
            has("mask") or has("key_mask") or self.band_lo is not None or self.band_hi is not None
        )
        is_masked = has("mask") or has("key_mask")
        _, L, S, *_ = self.sizes
        may_hide = may_hide_a_row(L, S, self.band_lo, self.band_hi, is_masked)
        bits = {
            # Folding scale into the exponential takes the maximum of unscaled scores, which needs a
            # positive factor.
            rules.SCALED: self.scale <= 0
            or self.softcap > 0
            or has("bias")
            or (hides and is_exact),
            rules.SOFTCAP: self.softcap > 0,
            rules.BIAS: has("bias"),
            rules.MASK: has("mask"),
            rules.KEY_MASK: has("key_mask"),
            rules.BAND_LO: self.band_lo is not None,
            rules.BAND_HI: self.band_hi is not None,
            rules.EXACT: hides and is_exact,
            rules.FILL_ADDS: hides and self.fill_adds,
            rules.KEEP: has("keep"),
            rules.SINK: has("sink"),
            rules.EMPTY_ROWS: is_absorbing and not has("sink") and may_hide,
            rules.FINE_TANH: self.softcap > 0 and self.tensors["q"].dtype == torch.float32,
        }
        return sum(bit.value for bit, is_set in bits.items() if is_set)


def chunks(width: int) -> tuple[int, int]:
    """Powers of two, the second 0 or at least 16, that cover `width` with little padding: 96 is 64
    + 32, not 128."""
    first = 1 << (width.bit_length() - 1)
    rest = width - first
    return first, 0 if rest == 0 else max(16, 1 << (rest - 1).bit_length())


def chunks_of_sums(width: int, precision: str) -> tuple[int, int]:
    """The chunks that one product each sums.

    Tensor cores truncate as they add: of fp32, a score summed over 256 lanes is off by more than
    twice eager's error, and sums over 128 lanes are most of the error of gradients (H200). Two sums
    over half of them, added outside, are nearer. The second is no narrower than 64 lanes: the parts
    of a narrow chunk lie at a fixed place in shared memory, see `to_copy`.
    """
    if precision != "ieee":
        return chunks(width)
    first = min(1 << (width - 1).bit_length(), 64 if width <= 128 else 128)
    rest = width - first
    return first, 0 if rest <= 0 else 64 if rest <= 64 else 128


def named_strides(name: str, operand: Operand | None, letters: str) -> dict[str, int]:
    strides = operand.strides if operand else (0,) * len(letters)
    return {
        f"stride_{name}_{letter}": stride for letter, stride in zip(letters, strides, strict=True)
    }


def score_arguments(attention: Attention) -> tuple[dict[str, str], dict[str, Any]]:
    """Tensors and scalars that turn products into probabilities: the same in every attention
    kernel."""
    tensors = attention.tensors
    layouts = {"bias": "bkrls", "mask": "bkrls", "key_mask": "bs", "keep": "bkrls"}
    scalars: dict[str, Any] = {}
    for name, letters in layouts.items():
        scalars |= named_strides(name, tensors.get(name), letters)
    B, L, S, K, R, D, E = attention.sizes
    D1, D2 = chunks_of_sums(D, attention.dot_precision)
    E1, E2 = chunks_of_sums(E, attention.dot_precision)
    bits = attention.rules
    scalars |= {
        "B": B,
        "L": L,
        "S": S,
        "scale": float(attention.scale),
        "unit": LOG2E if bits & rules.SCALED.value else attention.scale * LOG2E,
        "softcap": float(attention.softcap),
        "fill": float(attention.fill) if bits & rules.EXACT.value else 0.0,
        "band_lo": attention.band_lo or 0,
        "band_hi": attention.band_hi or 0,
        "keep_scale": float(attention.keep_scale),
        "K": K,
        "R": R,
        "D": D,
        "D1": D1,
        "D2": D2,
        "E": E,
        "E1": E1,
        "E2": E2,
        "RULES": bits,
        "PRECISION": attention.dot_precision,
    }
    # An absent tensor is never read; q stands in because a parameter must be some pointer.
    return {f"{name}_ptr": name if name in tensors else "q" for name in layouts}, scalars


def can_describe(*operands: Operand) -> bool:
    """Whether the copy engine reads all of them: 16-byte aligned base, contiguous columns, positive
    outer strides in multiples of 16 bytes, the two head dimensions of queries mergeable, and a
    width that is one chunk."""
    for x in operands:
        shape, strides = merged_heads(x)
        width = shape[-1]
        if width & (width - 1) or x.dtype.itemsize != 2 or not x.is_aligned or strides[-1] != 1:
            return False
        if any(stride <= 0 or stride * x.dtype.itemsize % 16 for stride in strides[:-1]):
            return False
        if len(x.shape) == 5 and x.strides[2] != x.shape[3] * x.strides[3]:
            return False
    return True


def is_streamed(x: Operand) -> bool:
    """Whether Triton copies tiles of x asynchronously. It moves four bytes or more at a time, and
    of a stride it knows only whether 16 divides it."""
    if x.strides[-1] != 1:
        return False
    return x.dtype.itemsize >= 4 or (x.is_aligned and all(n % 16 == 0 for n in x.strides[:-1]))


def to_copy(tensors: Mapping[str, Operand], names: tuple[str, ...], by_box: bool) -> list[str]:
    """Which of the named tensors a kernel can stream only after a copy: by box (descriptor) where
    that is wanted and possible, else through pointers.

    What is not streamed costs registers until they spill. Worse, a narrow chunk of it then lies at
    a fixed place in shared memory, for which ptxas 12.8 may compute addresses from registers that
    it never set (wrong numbers and illegal accesses on an H200; 12.9 is right).
    """
    if by_box and can_describe(*(tensors[name] for name in names)):
        return []
    return [name for name in names if not is_streamed(tensors[name])]


def merged_heads(x: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides as [batch, rows, heads, width]."""
    if len(x.shape) == 4:
        return x.shape, x.strides
    B, N, K, R, D = x.shape
    return (B, N, K * R, D), (*x.strides[:2], *x.strides[3:])


def described(streams: Mapping[str, tuple[str, Operand]], rows: int) -> dict[str, Descriptor]:
    """Boxes of `rows` rows of one head, by parameter, over the given slots."""
    boxes = {}
    for parameter, (slot, x) in streams.items():
        shape, strides = merged_heads(x)
        boxes[parameter] = Descriptor(slot, shape, strides, (1, rows, 1, shape[-1]))
    return boxes


def execute(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Allocates, launches in order, returns the results."""
    device = tensors["q"].device
    slots = dict(tensors)
    for name, operand in plan.allocate.items():
        slots[name] = torch.empty_strided(
            operand.shape, operand.strides, dtype=operand.dtype, device=device
        )
    for launch in plan.launches:
        arguments: dict[str, Any] = {name: slots[slot] for name, slot in launch.tensors.items()}
        arguments |= {
            name: _tiled(slots[box.slot], box) for name, box in launch.descriptors.items()
        }
        launch.kernel[launch.grid](**arguments, **launch.scalars, **launch.options)
    return tuple(slots[name] for name in plan.results)


def _tiled(x: torch.Tensor, box: Descriptor) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(box.shape), list(box.strides), list(box.block))
