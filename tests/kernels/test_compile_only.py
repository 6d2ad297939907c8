"""Every kernel compiles for sm_80, sm_90 and sm_100 within shared memory and without spills, but
for what tiles of fp32 are allowed; no GPU needed."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Bytes a thread that tiles of fp32 keep outside of registers, on sm_90 because they are faster
# than those that keep less, see `configs.IEEE`; others none.
KEPT_OUTSIDE = {
    80: {},
    90: {
        "D64-E64-fp32-causal-padded": 144,
        "D128-E128-fp32-causal-padded": 128,
        "D128-E128-fp32-causal-padded-long": 80,
        "D128-E128-fp32-causal-rope-tf32": 8,
        "D256-E256-fp32-causal-padded": 736,
        "D256-E256-fp32-causal-padded-long": 736,
        "D256-E256-fp32-causal-padded-tf32": 24,
    },
    100: {"D64-E64-fp32-causal-padded": 24},
}
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
CASES = {
    80: [
        "D64-E64-bf16-causal-padded",
        "D96-E96-bf16-causal-padded",
        "D128-E128-bf16-causal-rope",
        "D256-E256-bf16-causal-padded",
        "D64-E64-fp32-causal-padded",
    ],
    90: [
        "D64-E64-bf16-causal-padded-adds-softcap-rope-doubles",
        "D64-E64-bf16-bias-keep-softcap",
        "D96-E96-bf16-causal-padded-sliced",
        "D160-E160-bf16-sliced",
        "D128-E128-bf16-causal-rope",
        "D128-E128-bf16-causal-pointers",
        "D256-E256-bf16-causal-padded-rope",
        "D64-E64-fp32-causal-padded",
        "D64-E64-fp32-causal-tf32",
        "D128-E128-fp32-causal-padded",
        "D128-E128-fp32-causal-rope-tf32",
        "D128-E128-fp32-causal-padded-long",
        "D256-E256-fp32-causal-padded",
        "D256-E256-fp32-causal-padded-long",
        "D256-E256-fp32-causal-padded-tf32",
    ],
    100: [
        "D64-E64-bf16-causal-padded",
        "D96-E96-bf16-causal-padded",
        "D128-E128-bf16-causal-rope",
        "D256-E256-bf16-causal-padded",
        "D64-E64-fp32-causal-padded",
    ],
}


@functools.cache
def records(sm):
    """What compiling the cases of an architecture reports, from a process without interpreter."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_plans.py")
    command = [sys.executable, "-W", "ignore", str(script), str(sm), *CASES[sm]]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("sm", CASES)
def test_no_kernel_spills(sm):
    spilled = [
        f"{x['case']} {x['kernel']}: {x['stack']} bytes"
        for x in records(sm)
        if x["stack"] > KEPT_OUTSIDE[sm].get(x["case"], 0)
    ]
    assert spilled == []


@pytest.mark.slow
@pytest.mark.parametrize("sm", CASES)
def test_no_kernel_reads_a_register_that_was_never_set(sm):
    """With ptxas 12.8 the forward did, where V lies in two chunks and is not streamed."""
    unset = [f"{x['case']} {x['kernel']}: {x['unset'][0]}" for x in records(sm) if x["unset"]]
    assert unset == []


@pytest.mark.slow
def test_nothing_is_computed_in_fp64_though_inductor_passes_floats_so():
    """It was: a backward that Inductor launched took twice as long as the same launches by us."""
    found = [f"{x['case']} {x['kernel']}: {x['doubles'][0]}" for x in records(90) if x["doubles"]]
    assert found == []
    assert any("doubles" in x["case"] for x in records(90))


@pytest.mark.slow
@pytest.mark.parametrize("sm", CASES)
def test_every_kernel_fits_shared_memory(sm):
    """Compiling does not refuse what no device could launch."""
    too_big = [
        f"{x['case']} {x['kernel']}: {x['shared']}"
        for x in records(sm)
        if x["shared"] > SHARED_LIMIT[sm]
    ]
    assert too_big == []


@pytest.mark.slow
@pytest.mark.parametrize("sm", CASES)
def test_products_run_on_tensor_cores(sm):
    main = [x for x in records(sm) if x["kernel"].startswith(("forward", "keys", "queries"))]
    assert [x["case"] for x in main if not x["uses_tensor_cores"]] == []
    assert {x["case"].split("-")[0] for x in main} == {case.split("-")[0] for case in CASES[sm]}


@pytest.mark.slow
def test_contiguous_half_precision_streams_through_descriptors_on_hopper():
    streamed = {
        x["kernel"]
        for x in records(90)
        if x["case"] == "D128-E128-bf16-causal-rope" and x["uses_tma"]
    }
    assert streamed == {"forward_kernel", "keys_kernelKV", "queries_kernel"}
