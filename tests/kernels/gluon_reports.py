"""What compiling Gluon launches for sm_90 reports, from a process that has no interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

SHARED_LIMIT = 232_448
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "i1"}


def records_of(name, plan, operands):
    """The Gluon launches of a plan whose inputs are `operands`, in words that a process without
    torch understands."""
    slots = {**operands, **plan.allocate}
    for launch in plan.launches:
        if launch.descriptors:
            function = launch.kernel.fn
            yield {
                "name": f"{name} {function.__name__}",
                "module": function.__module__,
                "kernel": function.__name__,
                "pointers": {
                    name: NAMES[slots[slot].dtype] for name, slot in launch.tensors.items()
                },
                "descriptors": {
                    name: (NAMES[slots[box.slot].dtype], box.block)
                    for name, box in launch.descriptors.items()
                },
                "scalars": dict(launch.scalars),
                "num_warps": launch.num_warps,
            }


def compiled(records):
    """A report a record: name, registers, stack, unset, shared, products, copies."""
    root = Path(__file__).parents[2]
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    lines = "\n".join(json.dumps(x) for x in records)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_gluon.py"))]
    done = subprocess.run(
        command, input=lines, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(report):
    """What is wrong with a compiled kernel, in words."""
    if report["stack"] > 0:
        yield f"{report['name']} spills {report['stack']} bytes"
    if report["unset"]:
        yield f"{report['name']} reads a register that was never set: {report['unset'][0]}"
    if report["shared"] > SHARED_LIMIT:
        yield f"{report['name']} takes {report['shared']} bytes of shared memory"
    if not (report["products"] and report["copies"]):
        yield f"{report['name']} does not copy or multiply in hardware"
