"""Runs a script once for each of two ranks and collects what they wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "compositions"


def two_ranks(
    script: str, folder: Path, *arguments: str, timeout: float = 300
) -> list[dict[str, Any]]:
    """The JSON of both ranks. The script takes a rank, the folder that both write to, and the
    arguments."""
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPTS / script, str(rank), str(folder), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=timeout)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
