"""Compiles the kernels around given or returned weights without a GPU: `python compile_weights.py
sm CASE...` prints a line of JSON per launch.

A CASE is `backward-D128-bf16-L1024` or `forward-D64-fp32-L1024` with any of: rope, pointers, stored
(dS kept), again (dS made again), gathered (what the sm_90
kernels leave to plain ones), turned, causal, padded, bias, tf32, tilesBMxBNxWARPSxSTAGES. Or
`linear-C1024-fp32-T512` with any of: tf32, pointers, ready (operands split before),
tilesBMxBNxBKxWARPSxSTAGES.
"""

import dataclasses
import re
import sys

import torch
import triton
from compile_plans import DTYPES, doubles_in, source_of
from sass import print_records
from triton.backends.compiler import GPUTarget

from inductor_gqa.kernels import gluon_weights, weights_backward
from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.plan import Attention, Operand


def tiles_of(rules):
    found = [rule for rule in rules if rule.startswith("tiles")]
    return Tiles(*map(int, found[0][5:].split("x"))) if found else None


def backward_plan(D, dtype, L, rules, capability):
    B, H, group = 1, 32, 4
    heads = Operand((B, L, H, D), (L * H * D, D, L * D, 1), dtype)  # [B, H, L, D] in memory
    tensors = {
        "grad_out": Operand.contiguous((B, L, H, D), dtype),
        "weights": Operand.contiguous((B, H, L, L), dtype),
        **dict.fromkeys(("q", "k", "v"), heads),
    }
    if "rope" in rules:
        tensors |= dict.fromkeys(
            ("cos_q", "sin_q", "cos_k", "sin_k"), Operand.contiguous((B, L, D), dtype)
        )
    subject = weights_backward.WeightsBackward(tensors, D**-0.5, group, capability=capability)
    config = weights_backward.weights_config(subject)
    if tiles := tiles_of(rules):
        config = dataclasses.replace(config, queries=tiles, keys=tiles)
    limits = {"stored": 2**40, "again": 0}
    limit = next((limits[rule] for rule in rules if rule in limits), config.ds_bytes)
    config = dataclasses.replace(config, ds_bytes=limit, is_turned="turned" in rules)
    if "gathered" in rules:
        plan = gluon_weights.plan_weights_backward_sm90(subject, is_packed=True)
        plain = tuple(x for x in plan.launches if not x.descriptors)
        return subject.tensors, dataclasses.replace(plan, launches=plain)
    use_descriptors = False if "pointers" in rules else None
    plan = weights_backward.plan_weights_backward(
        subject, is_packed=True, use_descriptors=use_descriptors, config=config
    )
    return subject.tensors, plan


def forward_plan(D, dtype, L, rules, capability):
    from inductor_gqa.kernels import weights_forward

    B, K, R = 1, 4, 4
    tensors = {
        "q": Operand.contiguous((B, L, K, R, D), dtype),
        "k": Operand.contiguous((B, L, K, D), dtype),
        "v": Operand.contiguous((B, L, K, D), dtype),
    }
    numbers = {
        "scale": 1.0,
        "capability": capability,
        "precision": "tf32" if "tf32" in rules else "ieee",
    }
    if "rope" in rules:
        tensors |= dict.fromkeys(
            ("cos_q", "sin_q", "cos_k", "sin_k"), Operand.contiguous((B, L, D), dtype)
        )
    if "causal" in rules:
        numbers |= {"band_hi": 0}
    if "padded" in rules:
        tensors["key_mask"] = Operand.contiguous((B, L), torch.bool)
        numbers |= {"fill": torch.finfo(torch.float32).min}
    if "bias" in rules:
        tensors["bias"] = Operand.contiguous((B, K, R, L, L), dtype)
    subject = Attention(tensors, **numbers)
    use_descriptors = False if "pointers" in rules else None
    plan = weights_forward.plan_weights_forward(
        subject, torch.float32, use_descriptors=use_descriptors, tiles=tiles_of(rules)
    )
    return tensors, plan


def linear_plan(C, dtype, T, rules, capability):
    from inductor_gqa.kernels import linear_forward

    widths = (1024, 256, 256)
    tensors = {"x": Operand.contiguous((T, C), dtype)}
    tensors |= {f"w{i}": Operand.contiguous((n, C), dtype) for i, n in enumerate(widths)}
    weights = [tensors[f"w{i}"] for i in range(len(widths))]
    sizes = [rule[5:] for rule in rules if rule.startswith("tiles")]
    plan = linear_forward.plan_linear_forward(
        weights,
        tensors["x"],
        "tf32" if "tf32" in rules else "ieee",
        capability,
        use_descriptors=False if "pointers" in rules else None,
        tiles=linear_forward.LinearTiles(*map(int, sizes[0].split("x"))) if sizes else None,
        is_split_before="ready" in rules,
    )
    return tensors, plan


def compiled(case, sm):
    """One record for each launch of the case."""
    which, D, dtype_name, L, *rules = case.split("-")
    plan_of = {"backward": backward_plan, "forward": forward_plan, "linear": linear_plan}[which]
    tensors, plan = plan_of(int(D[1:]), DTYPES[dtype_name], int(L[1:]), rules, (sm // 10, sm % 10))
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
            "shared": result.metadata.shared,
            "doubles": doubles_in(result.asm["ptx"]),
            "uses_tma": "cp.async.bulk.tensor" in result.asm["ptx"],
            "uses_wgmma": "wgmma" in result.asm["ptx"],
            "uses_tensor_cores": bool(
                re.search(r"wgmma|tcgen05\.mma|mma\.sync", result.asm["ptx"])
            ),
        }


if __name__ == "__main__":
    target = int(sys.argv[1])
    print_records(target, (x for wanted in sys.argv[2:] for x in compiled(wanted, target)))
