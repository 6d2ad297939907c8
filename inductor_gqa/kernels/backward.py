"""Attention backward: which kernels run in which order, and the launcher.

Split in two, dK and dV by key tile and dQ by query tile: seven products instead of the five of a
fused kernel, and in exchange no fp32 dQ buffer, no atomics and the same bits every time. Both
halves rebuild P from LSE. Two launches, because in one kernel they would share one register budget
and spill at D = 128 (H200).
"""

from typing import Any

import torch

from inductor_gqa.kernels import configs, rules
from inductor_gqa.kernels.backward_keys import keys_kernel
from inductor_gqa.kernels.backward_queries import queries_kernel
from inductor_gqa.kernels.forward import collect
from inductor_gqa.kernels.plan import (
    Attention,
    Launch,
    Operand,
    Plan,
    can_describe,
    described,
    execute,
    named_strides,
    score_arguments,
    to_copy,
)
from inductor_gqa.kernels.prepare import delta_kernel, origin_kernel
from inductor_gqa.kernels.rotate import plan_rotation

ROWS = 64  # of a tile of the preparing kernels


def plan_backward(
    attention: Attention,
    needs: tuple[bool, bool, bool] = (True, True, True),
    use_descriptors: bool | None = None,
) -> Plan:
    """Launches for the gradients in `needs` (q, k, v). Results: dq, dk, dv, of shape (0,) where not
    needed.

    Rotations first if there are tables, then delta and, for scores that may be huge and equal, the
    parts of LSE.
    """
    tensors = attention.tensors
    B, L, S, K, R, D, E = attention.sizes
    need_q, need_k, need_v = needs
    gradients = {
        "dq": Operand.contiguous((B, L, K, R, D) if need_q else (0,), tensors["q"].dtype),
        "dk": Operand.contiguous((B, S, K, D) if need_k else (0,), tensors["k"].dtype),
        "dv": Operand.contiguous((B, S, K, E) if need_v else (0,), tensors["v"].dtype),
    }
    if not any(needs):
        return Plan(gradients, (), ("dq", "dk", "dv"))

    if use_descriptors is None:
        use_descriptors = attention.has_descriptors
    copied = to_copy(tensors, ("q", "grad_out"), use_descriptors) if need_k or need_v else []
    copied += to_copy(tensors, ("k", "v"), use_descriptors) if need_q else []
    scratch, launches, names = plan_rotation(attention, copied)
    operands = {**tensors, **scratch}
    q, k, v, grad_out = (operands[names[name]] for name in ("q", "k", "v", "grad_out"))
    sources, scalars = score_arguments(attention)
    sources |= {f"{name}_ptr": names[name] for name in ("q", "k", "v", "grad_out")}
    sources |= {"dq_ptr": "dq", "dk_ptr": "dk", "dv_ptr": "dv"}
    sources |= {"rest_ptr": "lse", "origin_ptr": "lse", "delta_ptr": "lse"}
    scalars |= (
        named_strides("q", q, "blkrd")
        | named_strides("k", k, "bskd")
        | named_strides("v", v, "bske")
    )
    scalars |= named_strides("grad_out", grad_out, "blkre")
    per_row = Operand.contiguous((B, K, R, L), torch.float32)
    if need_q or need_k:
        scratch, sources = scratch | {"delta": per_row}, sources | {"delta_ptr": "delta"}
        launches += (_delta_launch(attention, names["grad_out"], scalars),)
    if attention.rules & rules.SHIFTED.value:
        scratch |= {"origin": per_row, "rest": per_row}
        launches += (_origin_launch(attention, sources, scalars),)
        sources |= {"origin_ptr": "origin", "rest_ptr": "rest"}

    if need_k or need_v:
        streams = {"q_src": (names["q"], q), "grad_out_src": (names["grad_out"], grad_out)}
        by_box = use_descriptors and can_describe(q, grad_out)
        config = attention.config("descriptors" if by_box else "pointers")
        parts = [(True, False), (False, True)] if config.splits_keys else [(True, True)]
        for has_k, has_v in parts:
            flags = {"NEED_K": need_k and has_k, "NEED_V": need_v and has_v}
            if any(flags.values()):
                grid = -(-S // config.keys.BN) * B * K
                arguments = sources, scalars | flags
                launches += (
                    _half(
                        attention, keys_kernel, "k", grid, config.keys, streams, by_box, *arguments
                    ),
                )
    if need_q:
        streams = {"k_src": (names["k"], k), "v_src": (names["v"], v)}
        by_box = use_descriptors and can_describe(k, v)
        tiles = attention.config("descriptors" if by_box else "pointers").queries
        grid = -(-L // tiles.BM) * B * K * R
        launches += (
            _half(attention, queries_kernel, "q", grid, tiles, streams, by_box, sources, scalars),
        )
    return Plan(scratch | gradients, launches, ("dq", "dk", "dv"))


def _half(
    attention: Attention,
    kernel: Any,
    turned: str,
    grid: int,
    tiles: configs.Tiles,
    streams: dict[str, tuple[str, Operand]],
    by_box: bool,
    sources: dict[str, str],
    scalars: dict[str, Any],
) -> Launch:
    """Launch of the kernel that makes the gradient of `turned` (q or k), reading `streams` by
    descriptor or pointer."""
    tables, numbers = _tables(attention, turned)
    sources = sources | tables | {name: slot for name, (slot, _) in streams.items()}
    boxes = described(streams, tiles.BM if turned == "k" else tiles.BN) if by_box else {}
    return Launch(
        kernel,
        (grid,),
        {
            name: slot
            for name, slot in sources.items()
            if name in kernel.arg_names and name not in boxes
        },
        scalars | numbers | {"BM": tiles.BM, "BN": tiles.BN, "TMA": by_box},
        tiles.num_warps,
        tiles.num_stages,
        boxes,
    )


def _tables(attention: Attention, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Tensors and scalars that turn the gradient of q or k back; W = 0 leaves it as it is."""
    cos, sin = attention.tensors.get(f"cos_{name}"), attention.tensors.get(f"sin_{name}")
    scalars = named_strides("cos", cos, "bnw") | named_strides("sin", sin, "bnw")
    scalars |= {"START": attention.rope_start, "W": cos.shape[-1] if cos else 0}
    scalars |= {"INTERLEAVED": attention.rope_interleaved}
    return {f"{table}_ptr": f"{table}_{name}" if cos else "q" for table in ("cos", "sin")}, scalars


def _delta_launch(attention: Attention, grad_out: str, scalars: dict[str, Any]) -> Launch:
    B, L, _, K, R, *_ = attention.sizes
    return Launch(
        delta_kernel,
        (-(-L // ROWS) * B * K * R,),
        {"out_ptr": "out", "grad_out_ptr": grad_out, "delta_ptr": "delta"},
        {name: scalars[name] for name in delta_kernel.arg_names if name in scalars} | {"BM": ROWS},
        num_warps=4,
        num_stages=1,
    )


def _origin_launch(
    attention: Attention, sources: dict[str, str], scalars: dict[str, Any]
) -> Launch:
    B, L, _, K, R, *_ = attention.sizes
    tiles = attention.config("pointers").forward
    sources = sources | {"lse_ptr": "lse", "origin_ptr": "origin", "rest_ptr": "rest"}
    sources |= {"sink_ptr": "sink" if "sink" in attention.tensors else "q"}
    scalars = (
        scalars
        | named_strides("sink", attention.tensors.get("sink"), "kr")
        | {"BM": tiles.BM, "BN": tiles.BN}
    )
    return Launch(
        origin_kernel,
        (-(-L // tiles.BM) * B * K * R,),
        {name: slot for name, slot in sources.items() if name in origin_kernel.arg_names},
        {name: value for name, value in scalars.items() if name in origin_kernel.arg_names},
        tiles.num_warps,
        tiles.num_stages,
    )


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    cos_q: torch.Tensor | None = None,
    sin_q: torch.Tensor | None = None,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float,
    softcap: float = 0.0,
    band_lo: int | None = None,
    band_hi: int | None = None,
    fill: float = float("-inf"),
    fill_adds: bool = False,
    rope_start: int = 0,
    rope_interleaved: bool = False,
    keep_scale: float = 1.0,
    precision: str = "ieee",
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the unrotated q_BLKRD, k_BSKD and v_BSKE, contiguous; an empty tensor for what
    `needs` leaves out.

    `out` and `lse` are the forward's (contiguous), grad_out_BLKRE has any strides, keywords are the
    forward's.
    """
    tensors, attention = collect(
        {"q": q, "k": k, "v": v, "cos_q": cos_q, "sin_q": sin_q, "cos_k": cos_k, "sin_k": sin_k}
        | {"bias": bias, "mask": mask, "key_mask": key_mask, "keep": keep, "sink": sink}
        | {"grad_out": grad_out, "out": out, "lse": lse},
        {"scale": scale, "softcap": softcap, "band_lo": band_lo, "band_hi": band_hi, "fill": fill}
        | {"fill_adds": fill_adds, "rope_start": rope_start, "rope_interleaved": rope_interleaved}
        | {"keep_scale": keep_scale, "precision": precision},
    )
    dq, dk, dv = execute(plan_backward(attention, needs), tensors)
    return dq, dk, dv
