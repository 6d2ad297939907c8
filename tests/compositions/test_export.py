"""torch.export keeps the model's own ops; AOTInductor packages call ours, which the process that
loads them must have registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from fused import wrong
from spellings import Attention, inputs

import inductor_gqa
from inductor_gqa import report

ROOT = Path(__file__).resolve().parents[2]


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def test_export_knows_nothing_of_us():
    """The pass belongs to Inductor: an exported program can be run, saved and lowered anywhere."""
    module, args = Attention(mask=causal), inputs(grad=False)
    with inductor_gqa.enabled(always=True):
        program = torch.export.export(module, args)
    assert not any("inductor_gqa" in str(n.target) for n in program.graph.nodes)


def test_an_exported_program_fuses_when_it_is_compiled():
    module, args = Attention(mask=causal), inputs(grad=False)
    program = torch.export.export(module, args)
    with inductor_gqa.enabled(always=True), torch.no_grad(), report.collected() as found:
        ours = {"output": torch.compile(program.module())(*args)}
    eager, wide = {"output": module(*args)}, Attention(mask=causal).double()
    assert not wrong(ours, eager, {"output": wide(args[0].double())})
    assert (found.fused, found.left) == (1, 0)


LOADS = """
import sys, torch
stock, fused, reference = sys.argv[1:]
args, expected = torch.load(reference)
torch.testing.assert_close(torch._inductor.aoti_load_package(stock)(*args), expected)
assert "inductor_gqa" not in sys.modules
try:
    torch._inductor.aoti_load_package(fused)
except RuntimeError as why:
    print(why)
import inductor_gqa.ops
torch.testing.assert_close(torch._inductor.aoti_load_package(fused)(*args), expected)
print("equal")
"""


# Headers compiled beforehand cost more than two small packages gain by them.
WITHOUT_CACHES = {"fx_graph_cache": False, "aot_inductor.precompile_headers": False}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_aotinductor_packages(tmp_path):
    """By default a package needs nothing of us; fused with always=True, it needs the ops, and says
    so when it is loaded without."""
    module, args = Attention(mask=causal), inputs(grad=False)
    program = torch.export.export(module, args)
    paths = {name: str(tmp_path / f"{name}.pt2") for name in ("stock", "fused")}
    for name, path in paths.items():
        always = name == "fused"
        with (
            inductor_gqa.enabled(always=always),
            report.collected() as found,
            inductor_config.patch(WITHOUT_CACHES),
        ):
            torch._inductor.aoti_compile_and_package(program, package_path=path)
        (site,) = found.sites
        assert site.fused == always
        if always:
            assert "returns the weights" not in site.summary  # export asserts their dtype
        else:
            assert "AOTInductor makes a package, accepted with enable(always=True)" in site.reason
    torch.save((args, module(*args).detach()), tmp_path / "reference.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOADS, *paths.values()]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [*command, str(tmp_path / "reference.pt")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "Could not find schema for inductor_gqa::attention" in first
    assert last == "equal"


def test_an_assert_that_is_not_proven_stays():
    """Only what the trace has shown may be dropped."""
    from inductor_gqa import asserts

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    check = torch.ops.aten._assert_tensor_metadata.default
    proven = graph.call_function(check, (x, None, None, torch.float32), {"device": "cpu"})
    unproven = [
        graph.call_function(check, (x, None, None, torch.float64)),
        graph.call_function(check, (x, [2])),
        graph.call_function(check, (x,), {"device": torch.device("meta")}),
    ]
    proven.kwargs = {"device": torch.device("cpu"), "layout": torch.strided}
    assert asserts.is_proven(proven)
    assert not any(map(asserts.is_proven, unproven))
    asserts.erase_proven(graph)
    assert [n for n in graph.nodes if n.target is check] == unproven
