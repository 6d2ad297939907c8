"""Compiles the kernels of few queries without a GPU: `python compile_decode.py sm CASE...` prints a
line of JSON per launch.

A CASE is `D128-bf16-L1-R4` with any of: causal, window, padded, bias, mask, keep, sink, softcap,
exact, rope, tf32, sliced, doubles, descriptors, tilesBMxBNxWARPSxSTAGES.
"""

import re
import sys

import torch
import triton
from compile_plans import DTYPES, doubles_in, sliced, source_of
from compile_weights import tiles_of
from sass import print_records
from triton.backends.compiler import GPUTarget

from inductor_gqa.kernels.decode import Choices, plan_decode
from inductor_gqa.kernels.plan import Attention, Operand


def plan_of(case, capability):
    """B2-K8-S32768 with a cache that lies as [B, K, S, D], sliced: [B, S, K, D + 8]."""
    D, dtype_name, L, R, *rules = case.split("-")
    D, L, R, dtype = int(D[1:]), int(L[1:]), int(R[1:]), DTYPES[dtype_name]
    B, K, S = 2, 8, 32768
    operand = Operand.contiguous
    cache = Operand((B, S, K, D), (K * S * D, D, S * D, 1), dtype)
    tensors = {"q": operand((B, L, K, R, D), dtype), "k": cache, "v": cache}
    if "sliced" in rules:
        tensors |= {name: sliced(tensors[name]) for name in ("q", "k", "v")}
    numbers = {"scale": D**-0.5, "capability": capability}
    if "causal" in rules:
        numbers |= {"band_hi": S - L}
    if "window" in rules:
        numbers |= {"band_hi": S - L, "band_lo": S - L - 4095}
    if "padded" in rules:
        tensors["key_mask"] = operand((B, S), torch.bool)
        numbers |= {"fill": torch.finfo(torch.bfloat16).min, "fill_adds": True}
    if "exact" in rules:
        numbers |= {"fill": -1e4}
    for name in ("mask", "keep", "bias"):
        if name in rules:
            kind = dtype if name == "bias" else torch.bool
            tensors[name] = Operand((B, K, R, L, S), (L * S, 0, 0, S, 1), kind)
    if "sink" in rules:
        tensors["sink"] = operand((K, R), torch.float32)
    if "softcap" in rules:
        numbers |= {"softcap": 30.0}
    if "rope" in rules:
        table = Operand((B, L, D), (0, D, 1), torch.float32)
        tensors |= {"cos_q": table, "sin_q": table}
    if "tf32" in rules:
        numbers |= {"precision": "tf32"}
    attention = Attention(tensors, **numbers)
    choices = Choices(tiles=tiles_of(rules), use_descriptors="descriptors" in rules)
    return tensors, plan_decode(attention, choices=choices)


def compiled(case, sm):
    """One record for each launch of the case."""
    tensors, plan = plan_of(case, (sm // 10, sm % 10))
    slots = {**tensors, **plan.allocate}
    for launch in plan.launches:
        result = triton.compile(
            source_of(launch, slots, "fp64" if "doubles" in case else "fp32"),
            target=GPUTarget("cuda", sm, 32),
            options={
                "enable_fp_fusion": True,
                "num_warps": launch.num_warps,
                "num_stages": launch.num_stages,
            },
        )
        yield {
            "case": case,
            "sm": sm,
            "kernel": launch.kernel.fn.__name__,
            "cubin": result.asm["cubin"],
            "doubles": doubles_in(result.asm["ptx"]),
            "shared": result.metadata.shared,
            "uses_tma": "cp.async.bulk.tensor" in result.asm["ptx"],
            "copies_ahead": "cp.async" in result.asm["ptx"],
            "uses_tensor_cores": bool(
                re.search(r"wgmma|tcgen05\.mma|mma\.sync", result.asm["ptx"])
            ),
        }


if __name__ == "__main__":
    target = int(sys.argv[1])
    print_records(target, (x for wanted in sys.argv[2:] for x in compiled(wanted, target)))
