"""Compiles the launches of plans without a GPU: `python compile_plans.py sm CASE...` prints a line
of JSON per launch.

A script of its own because the interpreter, once asked for, cannot be left within a process. CASE
is for instance `D64-E64-bf16-causal` with any of: causal, window, padded, bias, softcap, keep,
sink, rope, exact, tf32, pointers, sliced, long (8192 queries and keys), doubles (floats are passed
as Inductor passes them).
"""

import dataclasses
import re
import sys

import torch
import triton
from sass import print_records
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inductor_gqa.kernels.backward import plan_backward
from inductor_gqa.kernels.forward import plan_forward
from inductor_gqa.kernels.plan import Attention, Operand

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "i1"}


def sliced(x):
    """Strides as if every row had eight more columns: multiples of 16 bytes, not of 16."""
    wide = Operand.contiguous((*x.shape[:-1], x.shape[-1] + 8), x.dtype)
    return dataclasses.replace(x, strides=wide.strides)


def attention(case, capability):
    """B1-H8-K2-L1024 or "long" with the widths, dtype and rules that the case names."""
    D, E, dtype_name, *rules = case.split("-")
    D, E, dtype = int(D[1:]), int(E[1:]), DTYPES[dtype_name]
    B, L, K, R = 1, 8192 if "long" in rules else 1024, 2, 4
    operand = Operand.contiguous
    tensors = {
        "q": operand((B, L, K, R, D), dtype),
        "k": operand((B, L, K, D), dtype),
        "v": operand((B, L, K, E), dtype),
        "out": operand((B, L, K, R, E), dtype),
        "grad_out": operand((B, L, K, R, E), dtype),
        "lse": operand((B, K, R, L), torch.float32),
    }
    if "sliced" in rules:
        tensors |= {name: sliced(tensors[name]) for name in ("q", "k", "v", "grad_out")}
    numbers = {"scale": D**-0.5, "capability": capability}
    if "causal" in rules:
        numbers |= {"band_hi": 0}
    if "window" in rules:
        numbers |= {"band_hi": 0, "band_lo": -255}
    if "padded" in rules:
        tensors["key_mask"] = operand((B, L), torch.bool)
        numbers |= {"fill": torch.finfo(torch.bfloat16).min, "fill_adds": "adds" in rules}
    if "exact" in rules:
        numbers |= {"fill": -1e4}
    if "mask" in rules:
        tensors["mask"] = operand((B, K, R, L, L), torch.bool)
    if "bias" in rules:
        tensors["bias"] = operand((B, K, R, L, L), dtype)
    if "keep" in rules:
        tensors["keep"] = operand((B, K, R, L, L), torch.bool)
    if "sink" in rules:
        tensors["sink"] = operand((K, R), torch.float32)
    if "softcap" in rules:
        numbers |= {"softcap": 30.0}
    if "rope" in rules:
        tensors |= {
            name: operand((B, L, D), dtype) for name in ("cos_q", "sin_q", "cos_k", "sin_k")
        }
    if "tf32" in rules:
        numbers |= {"precision": "tf32"}
    return Attention(tensors, **numbers), False if "pointers" in rules else None


def source_of(launch, slots, floats="fp32"):
    """What the just-in-time compiler would see at this launch."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if name in launch.tensors:
            operand = slots[launch.tensors[name]]
            signature[name] = "*" + NAMES[operand.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in launch.descriptors:
            box = launch.descriptors[name]
            signature[name] = f"tensordesc<{NAMES[slots[box.slot].dtype]}{list(box.block)}>"
        else:
            value = launch.scalars[name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[name], constants[(index,)] = "constexpr", value
            elif isinstance(value, int):
                signature[name] = "i32" if value < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = floats
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def doubles_in(ptx):
    """Instructions that compute in fp64; taking a parameter and rounding it are not meant."""
    return [x for x in re.findall(r"\b[a-z]+[a-z0-9._]*\.f64\b", ptx) if "cvt.rn.f32" not in x]


def compiled(case, sm, kernels=None):
    """One record for every distinct kernel that forward and backward of the case launch."""
    subject, use_descriptors = attention(case, (sm // 10, sm % 10))
    seen = set()
    for plan in (
        plan_forward(subject, use_descriptors=use_descriptors),
        plan_backward(subject, use_descriptors=use_descriptors),
    ):
        slots = {**subject.tensors, **plan.allocate}
        for launch in plan.launches:
            name = launch.kernel.fn.__name__
            part = "".join(x for x in "KV" if launch.scalars.get(f"NEED_{x}"))
            if name + part in seen or (kernels and name not in kernels):
                continue
            seen.add(name + part)
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
                "kernel": name + part,
                "cubin": result.asm["cubin"],
                "shared": result.metadata.shared,
                "doubles": doubles_in(result.asm["ptx"]),
                "uses_tma": "cp.async.bulk.tensor" in result.asm["ptx"],
                "uses_tensor_cores": bool(
                    re.search(r"wgmma|tcgen05\.mma|mma\.sync", result.asm["ptx"])
                ),
            }


if __name__ == "__main__":
    target = int(sys.argv[1])
    print_records(target, (x for wanted in sys.argv[2:] for x in compiled(wanted, target)))
