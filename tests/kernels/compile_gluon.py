"""Compiles Gluon kernels for sm_90 with neither a GPU nor torch.

Reads a JSON record a line from stdin and writes one a line. In: `name`, `module` and `kernel`,
`pointers` and `descriptors` (types by parameter), `scalars` (values), `num_warps`. A script of its
own because the interpreter, once asked for, cannot be left within a process.
"""

import importlib
import json
import sys

import triton
from sass import print_records
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

ELEMENTS = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


def source_of(kernel, record):
    """What the just-in-time compiler would see at this launch."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in record["pointers"]:
            signature[name] = "*" + record["pointers"][name]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in record["descriptors"]:
            dtype, block = record["descriptors"][name]
            layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[dtype])
            signature[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        else:
            value = record["scalars"][name]
            if parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
                signature[name], constants[(index,)] = "constexpr", value
            elif isinstance(value, int):
                signature[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
    return GluonASTSource(kernel, signature, constants, attributes)


def compiled(record):
    kernel = getattr(importlib.import_module(record["module"]), record["kernel"])
    options = {"num_warps": record["num_warps"], "enable_fp_fusion": True}
    target = GPUTarget("cuda", 90, 32)
    result = triton.compile(source_of(kernel, record), target=target, options=options)
    ptx = result.asm["ptx"]
    return {
        "name": record["name"],
        "triton": triton.__version__,
        "cubin": result.asm["cubin"],
        "shared": result.metadata.shared,
        "products": ptx.count("wgmma.mma_async"),
        "copies": ptx.count("cp.async.bulk.tensor"),
    }


if __name__ == "__main__":
    print_records(90, (compiled(json.loads(line)) for line in sys.stdin))
