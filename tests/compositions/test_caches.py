"""Compile caches: a second process takes fused graphs from them, and other sources never do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_CPP = ROOT / "tests" / "without_cpp.py"

STEP = """
import sys, torch, inductor_gqa
from torch._dynamo.utils import counters
from inductor_gqa import passes

runs = []
plain, own = passes.fuse, passes.source_digest
passes.fuse = lambda *args: runs.append(1) or plain(*args)

def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.3, -1) @ v

q = torch.randn(1, 2, 16, 8, requires_grad=True)
inductor_gqa.enable(always=True)
for digest in sys.argv[1:]:
    passes.source_digest = own if digest == "own" else lambda: digest
    torch._dynamo.reset()
    runs.clear()
    counters.clear()
    out = torch.compile(attention)(q, q, q)
    torch.testing.assert_close(out, attention(q, q, q))
    (ours,) = torch.autograd.grad(out.sum(), q)
    (eager,) = torch.autograd.grad(attention(q, q, q).sum(), q)
    torch.testing.assert_close(ours, eager)
    print(len(runs), counters["aot_autograd"]["autograd_cache_hit"])
"""


def process(folder, *digests):
    """For each digest of the sources: how often the pass ran, and hits of AOTAutograd's cache."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    script = folder / "step.py"
    script.write_text(STEP)
    command = [sys.executable, "-W", "ignore", str(WITHOUT_CPP), str(script), *digests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def spoil(folder):
    """Every cached graph becomes rubbish; torch itself checks no other file."""
    spoiled = 0
    for kind in ("fxgraph", "aotautograd"):
        for path in (folder / kind).rglob("*"):
            if path.is_file():
                path.write_bytes(b"rubbish")
                spoiled += 1
    return spoiled


@pytest.mark.slow
def test_cold_warm_upgraded_and_corrupt(tmp_path):
    """Cold, the pass runs; warm, it does not; after an upgrade it runs again, and so it does where
    the cache's files are rubbish."""
    assert process(tmp_path, "own") == [(1, 0)]
    assert process(tmp_path, "own", "of another version") == [(0, 1), (1, 0)]
    assert spoil(tmp_path) > 0
    assert process(tmp_path, "own") == [(1, 0)]
