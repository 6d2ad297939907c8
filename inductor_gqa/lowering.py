"""Lets Inductor launch our kernels itself: on CUDA, with static shapes, a backward without mask
tensors becomes its plan of Triton launches.

The generated code then has no Python op call in it, so that it has less to do per launch and can
become a CUDA graph or, with the C++ wrapper, run without Python. The layouts are Inductor's own and
known here, so nothing about strides is assumed. Everything else (other devices, symbolic sizes,
whatever an Inductor of another release refuses) stays the call of the op, which computes the same.

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


# Tensors with which the op stays a call.
OPAQUE = ("bias", "mask", "key_mask", "keep", "sink")


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
    opaque = fallback_handler(ops.attention_backward)
    lowered = functools.partial(_lowered, _backward, opaque)
    register_lowering(ops.attention_backward, type_promotion_kind=None)(lowered)


def _lowered(planned: Callable[..., Any], opaque: Callable[..., Any], *args: Any) -> Any:
    try:
        return planned(*args)
    except Exception as why:
        level = logging.DEBUG if isinstance(why, _Opaque) else logging.INFO
        log.log(level, "an op stays a call: %r", why)
        return opaque(*args)


def _backward(
    grad_out: Any, out: Any, lse: Any, nq: bool, nk: bool, nv: bool, *args: Any
) -> list[Any]:
    from .kernels.backward import plan_backward
    from .kernels.choice import is_gluon_backward

    tensors, attention = _attention(args, grad_out=grad_out, out=out, lse=lse)
    if is_gluon_backward(attention, (nq, nk, nv)):
        raise _Opaque("Inductor launches no Gluon kernels")
    return _launched(plan_backward(attention, (nq, nk, nv)), tensors)


def _attention(args: tuple[Any, ...], **more: Any) -> tuple[dict[str, Any], Any]:
    """The tensors as realized Inductor values, and the call without its data."""
    from .kernels.plan import Attention

    named = dict(zip(ops.NAMES, args, strict=True))
    for name in OPAQUE:
        if named[name] is not None:
            raise _Opaque(f"{name} is given")
    if named.pop("scale_tensor") is not None:
        raise _Opaque("the scale is a tensor")
    device = named["q"].get_device()
    if device is None or device.type != "cuda":
        raise _Opaque(f"the device is {device}")
    shape = [int(n) for n in named["q"].get_size()] if _is_static(named["q"]) else None
    if shape is None:
        raise _Opaque("sizes are symbolic")
    B, L = shape[:2]
    S = named["k"].get_size()[1]
    wide = {"cos_q": (B, L), "sin_q": (B, L), "cos_k": (B, S), "sin_k": (B, S)}
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, value in (*named.items(), *more.items()):
        if hasattr(value, "get_size"):
            tensors[name] = _realized(value, wide.get(name))
        elif value is not None or name.startswith("band"):
            numbers[name] = value
    operands = {name: _operand(x) for name, x in tensors.items()}
    capability = torch.cuda.get_device_capability(device)
    return tensors, Attention(operands, capability=capability, **numbers)


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
    from .kernels.plan import Operand

    layout = value.get_layout()
    size = tuple(int(n) for n in layout.size)
    stride = tuple(int(n) for n in layout.stride)
    start = int(layout.offset) * layout.dtype.itemsize
    return Operand(size, stride, layout.dtype, start % 16 == 0 and not _is_graph_input(value))


def _is_graph_input(value: Any) -> bool:
    """The caller may pass a graph input at any address."""
    from torch._inductor.virtualized import V

    return value.get_name() in V.graph.graph_inputs


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
        given = {name: _boxed(slots[slot]) for name, slot in launch.tensors.items()}
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
