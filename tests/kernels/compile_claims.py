"""What tests claim of `compile_weights.py` and `compile_decode.py`: no spills, no unset registers,
shared memory within limits, tensor cores used."""

import json
import os
import subprocess
import sys
from pathlib import Path

WITHOUT_PRODUCTS = (
    "prepare_kernel",
    "rotate_kernel",
    "combine_kernel",
    "gather_kernel",
    "pitch_kernel",
    "split_kernel",
)
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}


def assert_compiles(
    sm: int,
    cases: list[str],
    script: str = "compile_weights.py",
    kept_outside: dict[str, int] | None = None,
) -> None:
    """Compiles the cases in a process that has no interpreter and checks every kernel.

    `kept_outside`: bytes a thread that a case may keep outside of registers, others none.
    """
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-W", "ignore", str(path), str(sm), *cases]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["case"] for record in records} == set(cases)
    wrong = [
        record
        for record in records
        if record["stack"] > (kept_outside or {}).get(record["case"], 0)
        or record["unset"]
        or record["doubles"]
        or record["shared"] > SHARED_LIMIT[sm]
        or not (record["uses_tensor_cores"] or record["kernel"] in WITHOUT_PRODUCTS)
    ]
    assert wrong == []
