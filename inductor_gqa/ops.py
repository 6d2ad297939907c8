"""The ops that a fused site becomes: `inductor_gqa::attention`, `attention_weights`,
`attention_backward`, `weights_backward`, and the layers around it with their
gradients: `linear_forward`, `linear_backward`.

Functional, without aliasing, with fake implementations, so that the partitioner, activation
checkpointing, dynamic shapes and CUDA graphs see ordinary nodes. Inputs are what the projections
made, with whatever strides they have; the meaning is `reference.attention`.

    q_BLKRD, k_BSKD, v_BSKE     fp16, bf16, fp32 or fp64, one dtype
    cos_q, sin_q [B|1, L, W]    rotation tables, also cos_k, sin_k [B|1, S, W]; None: not rotated
    bias, mask, keep            [B|1, K|1, R|1, L|1, S|1]; float, bool (visible), bool (dropout)
    key_mask [B|1, S] bool, sink [K, R]
    scale_tensor                0-d, multiplies scale
    fill                        what a hidden score becomes (fill_adds: what is added); None: -inf
    out_BLKRE, lse_BKRL         results; lse is base 2
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .fallback import or_reference

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cos_q, Tensor? sin_q, Tensor? cos_k, Tensor? sin_k, "
    "Tensor? bias, Tensor? mask, Tensor? key_mask, Tensor? keep, Tensor? sink, "
    "Tensor? scale_tensor, "
    "float scale, float softcap, SymInt? band_lo, SymInt? band_hi, float? fill, bool fill_adds, "
    "int rope_start, bool rope_interleaved, float keep_scale, str precision"
)
NAMES = [part.split()[-1] for part in ARGUMENTS.split(", ")]
_library = torch.library.Library("inductor_gqa", "DEF")
_library.define(f"attention({ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor grad_out, Tensor out, Tensor lse, "
    f"bool needs_q, bool needs_k, bool needs_v, {ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_weights({ARGUMENTS}, ScalarType weights_dtype) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "weights_backward(Tensor grad_out, Tensor weights, Tensor q, Tensor k, Tensor v, "
    "Tensor? cos_q, Tensor? sin_q, Tensor? cos_k, Tensor? sin_k, Tensor? scale_tensor, "
    "float scale, int group, int rope_start, bool rope_interleaved, str precision, "
    "bool needs_q, bool needs_k, bool needs_v) -> (Tensor, Tensor, Tensor)"
)
_library.define("linear_backward(Tensor[] grads, Tensor[] weights, Tensor x) -> Tensor[]")
_library.define("linear_forward(Tensor x, Tensor[] weights, str precision) -> Tensor[]")
weights_backward = torch.ops.inductor_gqa.weights_backward.default
attention = torch.ops.inductor_gqa.attention.default
attention_weights = torch.ops.inductor_gqa.attention_weights.default
attention_backward = torch.ops.inductor_gqa.attention_backward.default
linear_backward = torch.ops.inductor_gqa.linear_backward.default
linear_forward = torch.ops.inductor_gqa.linear_forward.default


def arguments(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v, and the rest by name, with broadcast dims expanded (stride 0), the scale a number
    and no fill as -inf."""
    q, k, v = args[:3]
    named = dict(zip(NAMES[3:], args[3:], strict=True))
    B, L, K, R, _ = q.shape
    S = k.shape[1]
    for name in ("cos_q", "sin_q", "cos_k", "sin_k"):
        if named[name] is not None:
            named[name] = named[name].expand(B, -1, -1)
    for name in ("bias", "mask", "keep"):
        if named[name] is not None:
            named[name] = named[name].expand(B, K, R, L, S)
    if named["key_mask"] is not None:
        named["key_mask"] = named["key_mask"].expand(B, S)
    if named["fill"] is None:
        named["fill"] = -math.inf
    factor = named.pop("scale_tensor")
    if factor is not None:
        named["scale"] *= float(factor)
    return q, k, v, named


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    from . import cpu

    return cpu.attention(*arguments(args))


def _cpu_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    *args: Any,
) -> Any:
    from . import cpu

    return cpu.attention_backward(grad_out, out, lse, (needs_q, needs_k, needs_v), *arguments(args))


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    from . import reference

    return reference.attention(*arguments(args))


def _reference_backward(grad_out: Tensor, out: Tensor, lse: Tensor, *args: Any) -> Any:
    from . import reference

    return reference.attention_backward(grad_out, *arguments(args[3:]), args[:3])


def _cpu_weights(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from . import reference

    return reference.attention_weights(*arguments(args[:-1]), args[-1])


def _cuda_weights(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.choice import weights_forward

    q, k, v, named = arguments(args[:-1])
    for absent in ("keep", "sink", "keep_scale", "softcap"):
        del named[absent]
    return weights_forward(q, k, v, args[-1], **named)


def _cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from .kernels.choice import attention_forward

    q, k, v, named = arguments(args)
    return attention_forward(q, k, v, **named)


def _cuda_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    *args: Any,
) -> Any:
    from .kernels.choice import attention_backward as launch

    q, k, v, named = arguments(args)
    return launch(grad_out, q, k, v, out, lse, needs=(needs_q, needs_k, needs_v), **named)


def _cpu_weights_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from . import reference

    *tensors, factor, scale, group, start, interleaved, _, needs_q, needs_k, needs_v = args
    needs = (needs_q, needs_k, needs_v)
    scale = scale if factor is None else scale * float(factor)
    return reference.weights_backward(*tensors, scale, group, start, interleaved, *needs)


def _cuda_weights_backward(
    grad_out: Tensor, weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.choice import weights_backward as launch

    cos_q, sin_q, cos_k, sin_k, factor, scale, group, start, interleaved, precision, *needs = rest
    tables: dict[str, Any] = {"cos_q": cos_q, "sin_q": sin_q, "cos_k": cos_k, "sin_k": sin_k}
    B = q.shape[0]
    for name, table in tables.items():
        tables[name] = None if table is None else table.expand(B, -1, -1)
    return launch(
        grad_out,
        weights,
        q,
        k,
        v,
        **tables,
        scale=scale if factor is None else scale * float(factor),
        group=group,
        rope_start=start,
        rope_interleaved=interleaved,
        needs=(needs[0], needs[1], needs[2]),
        precision=precision,
    )


def _cpu_linear_backward(grads: list[Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    from . import reference

    return reference.linear_backward(grads, weights, x)


def _cuda_linear_backward(grads: list[Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    from .kernels.linear_backward import linear_backward as launch

    return launch(grads, weights, x)


def _cpu_linear_forward(x: Tensor, weights: list[Tensor], precision: str) -> list[Tensor]:
    from . import reference

    return reference.linear_forward(x, weights)


def _cuda_linear_forward(x: Tensor, weights: list[Tensor], precision: str) -> list[Tensor]:
    from .kernels.linear_forward import linear_forward as launch

    return launch(x, weights, precision)


for _name, _on_cpu, _on_gpu, _plain in (
    ("attention", _cpu, _cuda, _reference),
    ("attention_backward", _cpu_backward, _cuda_backward, _reference_backward),
    ("attention_weights", _cpu_weights, _cuda_weights, _cpu_weights),
    ("weights_backward", _cpu_weights_backward, _cuda_weights_backward, _cpu_weights_backward),
    ("linear_backward", _cpu_linear_backward, _cuda_linear_backward, _cpu_linear_backward),
    ("linear_forward", _cpu_linear_forward, _cuda_linear_forward, _cpu_linear_forward),
):
    _library.impl(_name, _on_cpu, "CPU")
    _library.impl(_name, or_reference(_on_gpu, _plain, _name), "CUDA")


@torch.library.register_fake("inductor_gqa::attention", lib=_library)
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, L, K, R, _ = q.shape
    return v.new_empty(B, L, K, R, v.shape[-1]), q.new_empty(B, K, R, L, dtype=torch.float32)


@torch.library.register_fake("inductor_gqa::attention_weights", lib=_library)
def _fake_weights(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _fake(q, k, v)
    return out, q.new_empty(*lse.shape, k.shape[1], dtype=rest[-1]), lse


@torch.library.register_fake("inductor_gqa::attention_backward", lib=_library)
def _fake_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    made = [
        x.new_empty(x.shape) if needed else x.new_empty(0)
        for x, needed in zip(args[:3], (needs_q, needs_k, needs_v), strict=True)
    ]
    return made[0], made[1], made[2]


@torch.library.register_fake("inductor_gqa::weights_backward", lib=_library)
def _fake_weights_backward(
    grad_out: Tensor, weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    group, needs = rest[6], rest[-3:]
    B, S, H, D = k.shape
    shapes = (q.shape, (B, S, H // group, D), (B, S, H // group, v.shape[-1]))
    made = [
        q.new_empty(shape if needed else 0) for shape, needed in zip(shapes, needs, strict=True)
    ]
    return made[0], made[1], made[2]


@torch.library.register_fake("inductor_gqa::linear_backward", lib=_library)
def _fake_linear_backward(grads: list[Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape), *(w.new_empty(w.shape) for w in weights)]


@torch.library.register_fake("inductor_gqa::linear_forward", lib=_library)
def _fake_linear_forward(x: Tensor, weights: list[Tensor], precision: str) -> list[Tensor]:
    return [x.new_empty(x.shape[0], w.shape[0]) for w in weights]


@register_flop_formula(torch.ops.inductor_gqa.linear_forward)
def _flops_linear_forward(x_shape: Any, w_shapes: Any, *a: Any, **kw: Any) -> int:
    return 2 * x_shape[0] * sum(n * c for n, c in w_shapes)


@register_flop_formula(torch.ops.inductor_gqa.linear_backward)
def _flops_linear_backward(g_shapes: Any, w_shapes: Any, x_shape: Any, *a: Any, **kw: Any) -> int:
    """Two matmuls a layer."""
    return 4 * x_shape[0] * sum(n * c for n, c in w_shapes)


@register_flop_formula(torch.ops.inductor_gqa.weights_backward)
def _flops_weights(
    g: Any, p: Any, q_shape: Any, k_shape: Any, v_shape: Any, *a: Any, **kw: Any
) -> int:
    """Four matmuls over all scores: dP, dV, dQ, dK."""
    B, L, H, D = q_shape
    return 4 * B * H * L * k_shape[1] * (D + v_shape[-1])


def _matmul_flops(q_shape: Any, k_shape: Any, v_shape: Any) -> tuple[int, int]:
    B, L, K, R, D = q_shape
    scores = 2 * B * K * R * L * k_shape[1]
    return scores * D, scores * v_shape[-1]


@register_flop_formula([torch.ops.inductor_gqa.attention, torch.ops.inductor_gqa.attention_weights])
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *rest: Any, **kwargs: Any) -> int:
    """Two matmuls over all scores, hidden ones included."""
    return sum(_matmul_flops(q_shape, k_shape, v_shape))


@register_flop_formula(torch.ops.inductor_gqa.attention_backward)
def _flops_backward(
    g: Any,
    out: Any,
    lse: Any,
    nq: Any,
    nk: Any,
    nv: Any,
    q_shape: Any,
    k_shape: Any,
    v_shape: Any,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """Five matmuls: scores again, dP, dV, dQ, dK."""
    scores, values = _matmul_flops(q_shape, k_shape, v_shape)
    return 3 * scores + 2 * values
