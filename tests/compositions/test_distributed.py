"""DDP, FSDP2 and tensor parallel on two ranks: each rank's graph holds local tensors, which fuse as
they do alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch is built without distributed"
)

# Forward and backward ops in the graphs of one rank: with checkpointing, a forward runs again.
EXPECTED = {
    "ddp": (2, 2),
    "ddp with checkpointing": (4, 2),
    "replicate": (2, 2),
    "fsdp2": (2, 2),
    "fsdp2 with checkpointing": (2, 2),  # eager checkpointing runs the compiled layer again
    "tensor parallel": (1, 1),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    script = str(HERE / "two_ranks.py")
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", EXPECTED)
def test_two_ranks(ranks, name):
    for found in (rank[name] for rank in ranks):
        assert "error" not in found, found["error"]
        assert found["left"] == []
        assert found["wrong"] == []
        assert (found["forward"], found["backward"]) == EXPECTED[name]
