"""Backward of attention from given weights P, about which nothing is assumed: P need not be
softmax(Q K^T).

delta = rowsum(P * dP) with dP = dO V^T, dS = P * (dP - delta), dQ = scale * dS K, dK = scale * dS^T
Q and dV = P^T dO summed over each group, then the adjoint of the rotation. Products accumulate in
fp32, dS is rounded once before its products.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.plan import (
    Descriptor,
    Launch,
    Operand,
    Plan,
    can_describe,
    execute,
    named_strides,
)
from inductor_gqa.kernels.weights_backward_keys import weights_keys_kernel
from inductor_gqa.kernels.weights_backward_queries import weights_queries_kernel

LAYOUTS = {"q": "blhd", "k": "bshd", "v": "bshe", "grad_out": "blhe"}
# Up to this size dS waits in L2 for the second kernel; beyond it a product costs less than the way
# to memory and back.
DS_BYTES_IN_L2 = 24 * 2**20


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
    """Tiles of both kernels, how large a dS is stored rather than made again, and whether
    scores made again lie as [keys, rows]."""

    queries: Tiles
    keys: Tiles
    ds_bytes: int = DS_BYTES_IN_L2
    is_turned: bool = False


@dataclasses.dataclass(frozen=True)
class WeightsBackward:
    """One such backward without its data: Operands grad_out [B, L, H, E], weights [B, H, L, S],
    q [B, L, H, D], k [B, S, H, D], v [B, S, H, E] and, where given, cos_q, sin_q, cos_k, sin_k."""

    tensors: Mapping[str, Operand]
    scale: float
    group: int
    rope_start: int = 0
    rope_interleaved: bool = False
    precision: str = "ieee"
    capability: tuple[int, int] | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, L, S, H, D, E."""
        B, L, H, D = self.tensors["q"].shape
        _, S, _, E = self.tensors["v"].shape
        return B, L, S, H, D, E


def weights_config(subject: WeightsBackward) -> WeightsConfig:
    """The largest tiles that neither spill nor exceed shared memory, by compiling for sm_80,
    sm_90 and sm_100."""
    *_, D, E = subject.sizes
    if subject.capability is None:
        # Small, so that short tests cross many borders; a limit that lets them take both ways with
        # dS.
        return WeightsConfig(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), ds_bytes=2**14)
    width = max(D, E)
    if subject.tensors["q"].dtype == torch.float32:
        size = 32 if width <= 64 else 16
        return WeightsConfig(Tiles(size, size, 4, 1), Tiles(size, size, 4, 1))
    if width > 128:
        return WeightsConfig(Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2))
    # Two stages leave room for two programs on an SM of Hopper: one loads while the other
    # multiplies.
    return WeightsConfig(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2))


def plan_weights_backward(
    subject: WeightsBackward,
    needs: tuple[bool, bool, bool] = (True, True, True),
    is_packed: bool = False,
    use_descriptors: bool | None = None,
    config: WeightsConfig | None = None,
) -> Plan:
    """One launch by query tiles, one by key tiles. Results: dq, dk, dv, or the packed buffer [B, L,
    (H + 2K) * D].

    `use_descriptors` None: where the device and the strides allow it; True overrules the device,
    not the strides.
    """
    need_q, need_k, need_v = needs
    tensors = subject.tensors
    B, L, S, H, D, E = subject.sizes
    K = H // subject.group
    dtype = tensors["q"].dtype
    if config is None:
        config = weights_config(subject)
    if use_descriptors is None:
        use_descriptors = subject.capability is not None and subject.capability >= (9, 0)

    pitch = -(-S // 16) * 16  # whole 16-byte vectors in every dtype
    outputs, places = outputs_of(subject, needs, is_packed)
    scratch: dict[str, Operand] = {}
    if need_q or need_k:
        scratch["delta"] = Operand.contiguous((B, H, L), torch.float32)
    stores_ds = need_k and B * H * L * pitch * dtype.itemsize <= config.ds_bytes
    if stores_ds:
        scratch["ds"] = Operand.contiguous((B, H, L, pitch), dtype)
    copies = (need_q or need_k) and not _has_vectors(tensors["weights"])
    if copies:
        scratch["copy"] = Operand.contiguous((B, H, L, pitch), tensors["weights"].dtype)

    scalars: dict[str, Any] = {"L": L, "S": S, "pitch": pitch, "scale": float(subject.scale)}
    scalars |= {"H": H, "GROUP": subject.group, "D": D, "E": E}
    scalars |= {"DP": 1 << (D - 1).bit_length(), "EP": 1 << (E - 1).bit_length()}
    scalars |= {"PRECISION": subject.precision if dtype == torch.float32 else "native"}
    scalars |= {"START": subject.rope_start, "INTERLEAVED": subject.rope_interleaved}
    scalars |= {"NEED_Q": need_q, "COPY": copies, "STORE_DS": stores_ds, "LOAD_DS": stores_ds}
    scalars |= {"TURNED": config.is_turned} | places
    for name, letters in LAYOUTS.items():
        scalars |= named_strides(name, tensors[name], letters)
    # What is absent is never read or written; q stands in because a parameter must be some pointer.
    sources = {
        name: name if name in scratch or name in tensors else "q"
        for name in ("delta", "ds", "copy", *tensors)
    }
    sources |= {name: "packed" if is_packed else name for name in ("dq", "dk", "dv")}

    def launch(kernel: Any, turned: str, tiles: Tiles, weights: str, parts: int) -> Launch:
        operands = {**tensors, **scratch, "weights": {**tensors, **scratch}[weights]}
        numbers = scalars | named_strides("weights", operands["weights"], "bhls")
        numbers |= {
            "length": operands["weights"].shape[-1],
            "key_programs": parts // (need_k + need_v or 1) if need_k else 0,
        }
        return _launch(
            kernel,
            turned,
            tiles,
            operands,
            sources | {"weights": weights},
            numbers,
            use_descriptors,
            parts,
        )

    launches: list[Launch] = []
    if need_q or need_k:
        parts = -(-L // config.queries.BM) * B * H
        launches.append(launch(weights_queries_kernel, "q", config.queries, "weights", parts))
    if need_k or need_v:
        parts = -(-S // config.keys.BN) * B * K * (need_k + need_v)
        launches.append(
            launch(weights_keys_kernel, "k", config.keys, "copy" if copies else "weights", parts)
        )
    return Plan(
        outputs | scratch, tuple(launches), ("packed",) if is_packed else ("dq", "dk", "dv")
    )


def outputs_of(
    subject: WeightsBackward, needs: tuple[bool, bool, bool], is_packed: bool
) -> tuple[dict[str, Operand], dict[str, int]]:
    """Tensors to allocate for the results, and where in them each gradient lies."""
    B, L, S, H, D, E = subject.sizes
    K = H // subject.group
    dtype = subject.tensors["q"].dtype
    if is_packed:
        width = H * D + K * D + K * E
        rows = {f"stride_{name}_b": L * width for name in ("dq", "dk", "dv")}
        rows |= {"stride_dq_l": width, "stride_dk_s": width, "stride_dv_s": width}
        return {"packed": Operand.contiguous((B, L, width), dtype)}, rows | {
            "first_dk": H * D,
            "first_dv": (H + K) * D,
        }
    shapes = {"dq": (B, L, H, D), "dk": (B, S, K, D), "dv": (B, S, K, E)}
    is_needed = dict(zip(shapes, needs, strict=True))
    outputs = {
        name: Operand.contiguous(shape if is_needed[name] else (0,), dtype)
        for name, shape in shapes.items()
    }
    places = {
        "stride_dq_b": L * H * D,
        "stride_dq_l": H * D,
        "stride_dk_b": S * K * D,
        "stride_dk_s": K * D,
    }
    return outputs, places | {
        "stride_dv_b": S * K * E,
        "stride_dv_s": K * E,
        "first_dk": 0,
        "first_dv": 0,
    }


def gradients_of(subject: WeightsBackward, is_packed: bool) -> dict[str, tuple[str, Operand, int]]:
    """Of each gradient: its slot, that slot as [B, N, heads, width], and its first head there.
    Packed, the widths must be equal."""
    B, L, S, H, D, E = subject.sizes
    K = H // subject.group
    dtype = subject.tensors["q"].dtype
    if is_packed:
        whole = Operand.contiguous((B, L, H + 2 * K, D), dtype)
        return {
            "dq": ("packed", whole, 0),
            "dk": ("packed", whole, H),
            "dv": ("packed", whole, H + K),
        }
    shapes = {"dq": (B, L, H, D), "dk": (B, S, K, D), "dv": (B, S, K, E)}
    return {name: (name, Operand.contiguous(shape, dtype), 0) for name, shape in shapes.items()}


def _has_vectors(x: Operand) -> bool:
    """Whether rows consist of whole 16-byte vectors, so that asynchronous copies can take them."""
    width = 16 // x.dtype.itemsize
    return (
        x.is_aligned
        and x.strides[-1] == 1
        and all(stride % width == 0 for stride in x.strides[:-1])
    )


def _is_describable(x: Operand) -> bool:
    return _has_vectors(x) and x.dtype.itemsize == 2 and all(stride > 0 for stride in x.strides)


def _launch(
    kernel: Any,
    turned: str,
    tiles: Tiles,
    operands: Mapping[str, Operand],
    sources: Mapping[str, str],
    scalars: Mapping[str, Any],
    use_descriptors: bool,
    parts: int,
) -> Launch:
    """Launch of the kernel that makes the gradient of `turned`. `sources` maps parameters, less
    their suffix, to slots."""
    cos, sin = operands.get(f"cos_{turned}"), operands.get(f"sin_{turned}")
    numbers = dict(scalars) | named_strides("cos", cos, "bnw") | named_strides("sin", sin, "bnw")
    numbers |= {"W": cos.shape[-1] if cos else 0, "BM": tiles.BM, "BN": tiles.BN}
    slots = dict(sources) | {table: f"{table}_{turned}" if cos else "q" for table in ("cos", "sin")}
    streams, rows = (("k", "v"), tiles.BN) if turned == "q" else (("q", "grad_out"), tiles.BM)
    is_streamed = use_descriptors and can_describe(*(operands[name] for name in streams))
    boxes = {
        f"{name}_src": (1, rows, 1, operands[name].shape[-1]) for name in streams if is_streamed
    }
    for name in ("weights", "ds"):
        if use_descriptors and name in operands and _is_describable(operands[name]):
            boxes[f"{name}_src"] = (1, 1, tiles.BM, tiles.BN)
    numbers |= {
        "TMA": is_streamed,
        "WEIGHTS_TMA": "weights_src" in boxes,
        "DS_TMA": "ds_src" in boxes,
    }
    # Whether a tile may pass an end. Descriptors return zeros there by themselves.
    L, S, pitch = numbers["L"], numbers["S"], numbers["pitch"]
    numbers |= {"CHECK": L % tiles.BM != 0 or S % tiles.BN != 0 or pitch % tiles.BN != 0}

    descriptors = {}
    for parameter, block in boxes.items():
        name = parameter.removesuffix("_src")
        x = operands[name]
        descriptors[parameter] = Descriptor(slots[name], x.shape, x.strides, block)
    parameters = {name: name.removesuffix("_src").removesuffix("_ptr") for name in kernel.arg_names}
    return Launch(
        kernel,
        (parts,),
        {
            name: slots[short]
            for name, short in parameters.items()
            if name != short and name not in descriptors
        },
        {name: numbers[name] for name, short in parameters.items() if name == short},
        tiles.num_warps,
        tiles.num_stages,
        {name: box for name, box in descriptors.items() if name in parameters},
    )


def weights_backward(
    grad_out_BLHE: torch.Tensor,
    weights_BHLS: torch.Tensor,
    q_BLHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHE: torch.Tensor,
    *,
    cos_q: torch.Tensor | None = None,
    sin_q: torch.Tensor | None = None,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    scale: float,
    group: int,
    rope_start: int = 0,
    rope_interleaved: bool = False,
    needs: tuple[bool, bool, bool] = (True, True, True),
    packed: bool = False,
    precision: str = "ieee",
    config: WeightsConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients dq_BLHD, dk_BSKD, dv_BSKE of unrotated q, k, v; K = H // group, k and v given once
    per query head.

    `packed` (needs L = S and all three) makes them views of one buffer [B, L, H*D + K*D + K*E],
    columns q, k, v: three weight-gradient GEMMs can then be one. Without it an empty tensor stands
    for what `needs` leaves out. Strides of the inputs are free, tables are [B, L, W] and [B, S, W].
    """
    named = {"grad_out": grad_out_BLHE, "weights": weights_BHLS}
    named |= {"q": q_BLHD, "k": k_BSHD, "v": v_BSHE}
    tables = {"cos_q": cos_q, "sin_q": sin_q, "cos_k": cos_k, "sin_k": sin_k}
    tensors, subject = subject_of(
        named | tables, scale, group, rope_start, rope_interleaved, precision
    )
    results = execute(plan_weights_backward(subject, needs, packed, config=config), tensors)
    return gradients_in(subject, results)


def subject_of(
    named: Mapping[str, torch.Tensor | None], *numbers: Any
) -> tuple[dict[str, torch.Tensor], WeightsBackward]:
    """The tensors that are given, and the call without its data; `numbers` are its fields in
    order."""
    tensors = {name: x for name, x in named.items() if x is not None}
    q = tensors["q"]
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    operands = {name: Operand.of(x) for name, x in tensors.items()}
    return tensors, WeightsBackward(operands, *numbers, capability=capability)


def gradients_in(
    subject: WeightsBackward, results: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, which may be views of one packed buffer."""
    if len(results) == 3:
        dq, dk, dv = results
        return dq, dk, dv
    B, L, _, H, D, E = subject.sizes
    K = H // subject.group
    dq, dk, dv = results[0].split((H * D, K * D, K * E), dim=-1)
    return dq.view(B, L, H, D), dk.view(B, L, K, D), dv.view(B, L, K, E)
