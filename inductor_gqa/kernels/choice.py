"""Which kernels compute an attention and its backward: a pure function of shapes, rules and device.

The Gluon kernels of sm_90 compute what the plain Triton ones do and are taken wherever they can be.
Beside cuDNN on one H200 (32/8 heads, bf16, D = 64 and 128, S = 512 to 16k, causal and not,
2026-12-03) their forward is 1.01 to 1.25 times as fast and a whole step 1.06 to 1.35 times
(bench/results/attention-core-h200.json); with RoPE 1.02 to 1.21 and 1.05 to 1.29 times
(bench/results/attention-h200.json). Biases, dropout and sinks stay with the plain kernels, and in
the backward key padding. The fp32 forward that returns its weights takes 0.32 to 0.98 of the plain
kernel's time at D = 64 over lengths of 128 to 4096.
"""

from __future__ import annotations

from typing import Any

import torch

from . import (
    decode,
    decode_tiles,
    gluon_backward,
    gluon_forward,
    gluon_weights,
    gluon_weights_forward,
)
from .forward import collect
from .plan import Attention
from .weights_backward import WeightsBackward, subject_of

# Whether the forward that splits the keys of few queries is used at all.
HAS_DECODE = True
# The sm_90 backward from given weights: fewest queries and keys, or fewest queries of all batches.
SHORTEST_GIVEN = 256
MOST_OF_FEW_GIVEN = 2048

TABLES = ("cos_q", "sin_q", "cos_k", "sin_k")
TENSORS = (*TABLES, "bias", "mask", "key_mask", "keep", "sink")


def is_gluon(attention: Attention) -> bool:
    """Whether the sm_90 forward takes this."""
    return gluon_forward.usable(attention) is None


def is_gluon_backward(attention: Attention, needs: tuple[bool, bool, bool]) -> bool:
    """Whether the sm_90 backward takes this attention."""
    return all(needs) and gluon_backward.usable_backward(attention) is None


def is_gluon_weights(subject: WeightsBackward, needs: tuple[bool, bool, bool]) -> bool:
    """Whether the sm_90 kernels take this backward from given weights."""
    B, L, S, *_ = subject.sizes
    is_long = min(L, S) >= SHORTEST_GIVEN or B * min(L, S) >= MOST_OF_FEW_GIVEN
    return is_long and gluon_weights.unusable(subject, needs) is None


def is_gluon_weights_forward(attention: Attention, weights_dtype: torch.dtype) -> bool:
    """Whether the sm_90 kernel takes this forward that returns its weights."""
    return gluon_weights_forward.unusable(attention, weights_dtype) is None


def is_decode(attention: Attention, multiprocessors: int) -> bool:
    """Whether the keys are split over programs: few queries, or a grid that leaves most of the
    device idle."""
    return HAS_DECODE and decode_tiles.pays(attention, multiprocessors)


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `forward.attention_forward`, by the kernel that is chosen."""
    from .forward import attention_forward as plain

    given, attention, numbers = _parts(q, k, v, arguments)
    if is_decode(attention, decode.multiprocessors_of(q.device)):
        return decode.attention_decode(q, k, v, **arguments)
    if not is_gluon(attention):
        return plain(q, k, v, **arguments)
    tables = {name: given[name] for name in TENSORS if name in given}
    return gluon_forward.attention_forward_sm90(q, k, v, **tables, **numbers)


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `backward.attention_backward`, by the kernels that are chosen."""
    from .backward import attention_backward as plain

    more = {"grad_out": grad_out, "out": out, "lse": lse}
    given, attention, numbers = _parts(q, k, v, arguments, more)
    if not is_gluon_backward(attention, needs):
        return plain(grad_out, q, k, v, out, lse, needs=needs, **arguments)
    tables = {name: given[name] for name in TABLES if name in given}
    return gluon_backward.attention_backward_sm90(grad_out, q, k, v, out, lse, **tables, **numbers)


def weights_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights_dtype: torch.dtype, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `weights_forward.weights_forward`, by the kernel that is chosen."""
    from .weights_forward import weights_forward as plain

    given, attention, _ = _parts(q, k, v, arguments)
    if not is_gluon_weights_forward(attention, weights_dtype):
        return plain(q, k, v, weights_dtype=weights_dtype, **arguments)
    _, multiprocessors = gluon_forward.device_facts(q.device)
    return gluon_weights_forward.weights_forward_sm90(attention, given, multiprocessors)


def weights_backward(
    grad_out: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `weights_backward.weights_backward`, by the kernels that are chosen."""
    from .weights_backward import weights_backward as plain

    named = {"grad_out": grad_out, "weights": weights, "q": q, "k": k, "v": v}
    named |= {name: arguments.get(name) for name in ("cos_q", "sin_q", "cos_k", "sin_k")}
    numbers = [arguments[name] for name in ("scale", "group", "rope_start", "rope_interleaved")]
    tensors, subject = subject_of(named, *numbers)
    if not is_gluon_weights(subject, needs):
        return plain(grad_out, weights, q, k, v, needs=needs, **arguments)
    return gluon_weights.weights_backward_sm90(subject, tensors)


def _parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arguments: dict[str, Any],
    more: dict[str, torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], Attention, dict[str, Any]]:
    """The tensors that are given, the call without its data, and its numbers."""
    tensors = {"q": q, "k": k, "v": v, **(more or {})}
    tensors |= {name: arguments.get(name) for name in TENSORS}
    numbers = {name: value for name, value in arguments.items() if name not in TENSORS}
    given, attention = collect(tensors, numbers)
    return given, attention, numbers
