"""What the assembler made of a kernel: registers, spills, and registers that are read but never
set.

The last is a check of ptxas itself. Version 12.8 at times forgets the first of a chain of 64-bit
additions in uniform registers: addresses of shared memory are then whatever the registers held,
which shows as wrong numbers or illegal accesses, and only on some shapes.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)\s+(.*?);")
TARGET = re.compile(r"(?:U?P(?:\d|T), )*UR(\d+)")
WRITES_UNIFORM = re.compile(r"U|R2UR|S2UR|LDCU|REDUX|CREDUX|SYNCS\.ARRIVES|VOTEU")
# Pairs of which an instruction reads only one half, the other being the descriptor of an operand
# that comes from registers.
DESCRIPTOR = re.compile(r"g?desc\[UR\d+\]")


def _dump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread at launch, and stack bytes (spills), of the one kernel in a binary."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _dump(cubin, "-res-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


def unset_registers(cubin: bytes) -> list[str]:
    """Instructions of a binary that compute with a uniform register which nothing above them
    sets."""
    return unset_in(_dump(cubin, "-sass"))


def unset_in(text: str) -> list[str]:
    """As `unset_registers`, of a disassembly. In program order: what a loop sets at its end and
    reads at its beginning is set before the loop as well."""
    known: set[int] = set()
    found = []
    for operation, arguments in INSTRUCTION.findall(text):
        target = TARGET.match(arguments) if WRITES_UNIFORM.match(operation) else None
        read = arguments[target.end() :] if target else arguments
        read = DESCRIPTOR.sub("", read)
        if any(int(register) not in known for register in re.findall(r"\bUR(\d+)\b", read)):
            found.append(f"{operation} {arguments.strip()}")
        if target:
            first = int(target[1])
            is_pair = ".64" in operation or "WIDE" in operation
            count = 4 if ".128" in operation else 2 if is_pair else 1
            known |= set(range(first, first + count))
    return found
