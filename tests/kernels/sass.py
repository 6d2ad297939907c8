"""What the assembler made of a kernel: registers, spills, and registers that are read but never
set.

The last is a check of ptxas itself. Version 12.8 at times forgets the first of a chain of 64-bit
additions in uniform registers: addresses of shared memory are then whatever the registers held,
which shows as wrong numbers or illegal accesses, and only on some shapes.
"""

import bisect
import itertools
import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)\s+(.*?);")
TARGET = re.compile(r"(?:U?P(?:\d|T), )*UR(\d+)")
WRITES_UNIFORM = re.compile(r"U|R2UR|S2UR|LDCU|REDUX|CREDUX|SYNCS\.ARRIVES|VOTEU")
# Pairs of which an instruction reads only one half, the other being the descriptor of an operand
# that comes from registers.
DESCRIPTOR = re.compile(r"g?desc\[UR\d+\]")


ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
ARCHITECTURES = {80: "SM80", 90: "SM90a", 100: "SM100a"}


def print_records(sm: int, records: Iterable[dict[str, Any]]) -> None:
    """Every record as a line of JSON: in place of its `cubin` its registers, stack and unset
    registers."""
    known = list(records)
    cubins: list[bytes] = [record.pop("cubin") for record in known]
    for record, cubin, unset in zip(known, cubins, unset_registers(sm, cubins), strict=True):
        registers, stack = resources(cubin)
        print(json.dumps({**record, "registers": registers, "stack": stack, "unset": unset}))


def _read(tool: str, content: bytes, *options: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        command = [path, *options, file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread at launch, and stack bytes (spills), of the one kernel in a binary."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _read("cuobjdump", cubin, "-res-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


def code_of(cubin: bytes) -> bytes:
    """The instructions of the one kernel in a binary, an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    strings = sections[names][4]
    (code,) = (
        cubin[start : start + length]
        for name, _, _, _, start, length in sections
        if cubin.startswith(b".text.", strings + name)
    )
    return code


def unset_registers(sm: int, cubins: list[bytes]) -> list[list[str]]:
    """Instructions of each binary that compute with a uniform register which nothing above them
    sets. All are disassembled by one call: starting the tool takes longer than reading a kernel."""
    codes = [code_of(cubin) for cubin in cubins]
    ends = list(itertools.accumulate(map(len, codes)))
    lines: list[list[str]] = [[] for _ in codes]
    address = 0
    for line in _read("nvdisasm", b"".join(codes), "-b", ARCHITECTURES[sm]).splitlines():
        if found := ADDRESS.match(line):
            address = int(found[1], 16)
            lines[bisect.bisect_right(ends, address)].append(line)
    assert address + 16 == ends[-1], "the disassembly is cut short"
    return [unset_in("\n".join(mine)) for mine in lines]


def unset_in(text: str) -> list[str]:
    """As `unset_registers`, of one disassembly. In program order: what a loop sets at its end and
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
