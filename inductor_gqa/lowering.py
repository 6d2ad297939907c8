"""Lets Inductor launch our kernels itself: on CUDA, with static shapes, an op becomes its plan of
Triton launches.

The generated code then has no Python op call in it, so that it has less to do per launch and can
become a CUDA graph or, with the C++ wrapper, run without Python. The layouts are Inductor's own and
known here, so nothing about strides is assumed. Everything else (other devices, symbolic sizes,
kernels in Gluon, whatever an Inductor of another release refuses) stays the call of the op, which
computes the same.

All private interfaces of Inductor's lowering that this package uses are used in this module.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list

from . import ops

log = logging.getLogger("inductor_gqa")


# Sizes of one are constants to Triton, and ptxas 12.8 crashed on a backward with a single key. A
# call of the op survives that, code that Inductor compiles does not.
FEWEST = 16
TABLES = ("cos_q", "sin_q", "cos_k", "sin_k")


class _Opaque(Exception):
    """The op stays a call, for this reason."""


@functools.cache
def install() -> None:
    """Registers the lowerings; once a process. Without Inductor's interfaces the ops stay calls."""
    try:
        from torch._inductor.lowering import fallback_handler, register_lowering
    except ImportError:
        log.info("Inductor's lowering has moved, ops stay calls", exc_info=True)
        return
    for op, planned in LOWERED:
        opaque = fallback_handler(op)
        lowered = functools.partial(_lowered, planned, opaque)
        register_lowering(op, type_promotion_kind=None)(lowered)


def _lowered(planned: Callable[..., Any], opaque: Callable[..., Any], *args: Any) -> Any:
    try:
        return planned(*args)
    except Exception as why:
        level = logging.DEBUG if isinstance(why, _Opaque) else logging.INFO
        log.log(level, "an op stays a call: %r", why)
        return opaque(*args)


def _forward(*args: Any) -> list[Any]:
    from .kernels.choice import is_decode, is_gluon
    from .kernels.decode import multiprocessors_of, plan_decode
    from .kernels.forward import plan_forward

    tensors, attention = _attention(args)
    multiprocessors = multiprocessors_of(args[0].get_device())
    if is_decode(attention, multiprocessors):
        return _launched(plan_decode(attention, multiprocessors), tensors)
    if is_gluon(attention):
        raise _Opaque("Inductor launches no Gluon kernels")
    return _launched(plan_forward(attention), tensors)


def _backward(
    grad_out: Any, out: Any, lse: Any, nq: bool, nk: bool, nv: bool, *args: Any
) -> list[Any]:
    from .kernels.backward import plan_backward
    from .kernels.choice import is_gluon_backward

    tensors, attention = _attention(args, grad_out=grad_out, out=out, lse=lse)
    if min(attention.sizes[1:3]) < FEWEST:
        raise _Opaque(f"lengths are {attention.sizes[1:3]}, accepted {FEWEST} or more")
    if is_gluon_backward(attention, (nq, nk, nv)):
        raise _Opaque("Inductor launches no Gluon kernels")
    return _launched(plan_backward(attention, (nq, nk, nv)), tensors)


def _weights(*args: Any) -> list[Any]:
    from .kernels.choice import is_gluon_weights_forward
    from .kernels.weights_forward import plan_weights_forward

    tensors, attention = _attention(args[:-1])
    if is_gluon_weights_forward(attention, args[-1]):
        raise _Opaque("Inductor launches no Gluon kernels")
    return _launched(plan_weights_forward(attention, args[-1]), tensors)


def _weights_backward(*args: Any) -> list[Any]:
    from .kernels.choice import is_gluon_weights
    from .kernels.weights_backward import WeightsBackward, plan_weights_backward

    names = ("grad_out", "weights", "q", "k", "v", *TABLES)
    named: dict[str, Any] = dict(zip(names, args, strict=False))
    factor, scale, group, start, interleaved, precision, *needs = args[len(names) :]
    if factor is not None:
        raise _Opaque("the scale is a tensor")
    tensors, operands, capability = _realized_tensors(named, _table_shapes(named))
    subject = WeightsBackward(operands, scale, group, start, interleaved, precision, capability)
    if is_gluon_weights(subject, (needs[0], needs[1], needs[2])):
        raise _Opaque("Inductor launches no Gluon kernels")
    return _launched(plan_weights_backward(subject, (needs[0], needs[1], needs[2])), tensors)


def _linear_forward(x: Any, weights: Any, precision: str) -> list[Any]:
    from .kernels.decode import multiprocessors_of
    from .kernels.linear_forward import is_gluon, plan_linear_forward, unusable

    named = {"q": x} | {f"w{i}": w for i, w in enumerate(weights)}
    tensors, operands, capability = _realized_tensors(named, {})
    tensors["x"], w = tensors["q"], [operands[f"w{i}"] for i in range(len(weights))]
    why = unusable(w, operands["q"], capability)
    if why is not None:
        raise _Opaque(why)
    if is_gluon(w, operands["q"], precision, capability):
        raise _Opaque("Inductor launches no Gluon kernels")
    multiprocessors = multiprocessors_of(x.get_device())
    plan = plan_linear_forward(w, operands["q"], precision, capability, multiprocessors)
    return _launched(plan, tensors)


def _attention(args: tuple[Any, ...], **more: Any) -> tuple[dict[str, Any], Any]:
    """The tensors as realized Inductor values, and the call without its data."""
    from .kernels.plan import Attention

    named = dict(zip(ops.NAMES, args, strict=True))
    if named.pop("scale_tensor") is not None:
        raise _Opaque("the scale is a tensor")
    B, L, K, R, _ = named["q"].get_size()
    S = named["k"].get_size()[1]
    shapes = _table_shapes(named) | dict.fromkeys(("bias", "mask", "keep"), (B, K, R, L, S))
    tensors, operands, capability = _realized_tensors(named | more, shapes | {"key_mask": (B, S)})
    numbers: dict[str, Any] = {
        name: value
        for name, value in named.items()
        if name not in tensors and (value is not None or name.startswith("band"))
    }
    return tensors, Attention(operands, capability=capability, **numbers)


def _table_shapes(named: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Leading dims that tables are broadcast to."""
    lengths = {"q": named["q"].get_size()[:2], "k": named["k"].get_size()[:2]}
    return {table: tuple(lengths[table[-1]]) for table in TABLES}


def _realized_tensors(
    named: dict[str, Any], shapes: dict[str, tuple[Any, ...]]
) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
    """What is a tensor in `named`, in memory and broadcast to its shape; what plans need to know of
    each; the device's capability."""
    device = named["q"].get_device()
    if device is None or device.type != "cuda":
        raise _Opaque(f"the device is {device}")
    tensors = {
        name: _realized(value, shapes.get(name))
        for name, value in named.items()
        if hasattr(value, "get_size")
    }
    operands = {name: _operand(x) for name, x in tensors.items()}
    return tensors, operands, torch.cuda.get_device_capability(device)


def _is_static(value: Any) -> bool:
    return all(n.is_Integer if hasattr(n, "is_Integer") else True for n in value.get_size())


def _realized(value: Any, shape: tuple[Any, ...] | None) -> Any:
    """The value in memory with a fixed layout, broadcast to the leading dims of `shape` by strides
    of 0."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    if not _is_static(value):
        raise _Opaque("sizes are symbolic")
    if shape is not None:
        size = [*shape, *value.get_size()[len(shape) :]]
        value = lowerings[torch.ops.aten.expand.default](value, size)
    inner = ir.ExternKernel.realize_input(value)
    inner.freeze_layout()
    return inner


def _operand(value: Any) -> Any:
    from torch._inductor.virtualized import V

    from .kernels.plan import Operand

    layout = value.get_layout()
    size = tuple(int(n) for n in layout.size)
    stride = tuple(int(n) for n in layout.stride)
    start = int(layout.offset) * layout.dtype.itemsize
    # Graph inputs too are aligned unless noted here: Inductor copies those that come otherwise.
    is_aligned = start % 16 == 0 and value.get_name() not in V.graph.unaligned_buffers
    return Operand(size, stride, layout.dtype, is_aligned)


def _launched(plan: Any, tensors: dict[str, Any]) -> list[Any]:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    device = tensors["q"].get_device()
    slots = dict(tensors)
    empty = lowerings[torch.ops.aten.empty_strided.default]
    for name, operand in plan.allocate.items():
        made = empty(list(operand.shape), list(operand.strides), dtype=operand.dtype, device=device)
        slots[name] = made
    for launch in plan.launches:
        # An empty result is of a gradient that nobody needs and nothing writes.
        named = {
            name: "q" if slot in plan.allocate and 0 in plan.allocate[slot].shape else slot
            for name, slot in launch.tensors.items()
        }
        given = {name: _boxed(slots[slot]) for name, slot in named.items()}
        described: dict[str, Any] = {}
        for name, box in launch.descriptors.items():
            given[name] = _viewed(slots[box.slot], box)
            described[name] = ("stable", (immutable_list(box.block),))  # hashed by Inductor
        ir.UserDefinedTritonKernel(
            kernel_idx=kernel_side_table.add_kernel(_configured(launch)),
            grid=[_three(launch.grid)],
            tma_descriptor_metadata=described,
            kernel_args={**given, **launch.scalars},
        )
    return [slots[name] for name in plan.results]


@functools.cache
def _tuned(kernel: Any, num_warps: int, num_stages: int) -> Any:
    import triton

    config = triton.Config({}, num_warps=num_warps, num_stages=num_stages)
    return triton.autotune([config], key=[])(kernel)


def _configured(launch: Any) -> Any:
    """The kernel with its one configuration; nothing is tuned."""
    return _tuned(launch.kernel, launch.num_warps, launch.num_stages)


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def _boxed(value: Any) -> Any:
    from torch._inductor import ir

    if isinstance(value, ir.TensorBox):
        return value
    return (
        ir.TensorBox(value)
        if isinstance(value, ir.StorageBox | ir.BaseView)
        else ir.TensorBox.create(value)
    )


def _viewed(value: Any, box: Any) -> Any:
    """The slot with the shape and strides of a descriptor."""
    from torch._inductor import ir

    while isinstance(value, ir.TensorBox):
        value = value.data
    layout = value.get_layout()
    data = value.data if isinstance(value, ir.ReinterpretView) else value
    if not isinstance(data, ir.StorageBox):
        data = ir.StorageBox(data)
    fixed = ir.FixedLayout(
        layout.device, layout.dtype, list(box.shape), list(box.strides), layout.offset
    )
    return ir.TensorBox(ir.ReinterpretView(data=data, layout=fixed))


LOWERED = (
    (ops.attention_backward, _backward),
    (ops.attention, _forward),
    (ops.attention_weights, _weights),
    (ops.weights_backward, _weights_backward),
    (ops.linear_forward, _linear_forward),
)
