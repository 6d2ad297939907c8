"""The decode benchmark in Triton's interpreter: its arguments, its check, no number without it."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """bench/decode.py, imported as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("decode")
    for name in ("measure", "decode_problem", "decode"):
        sys.modules.pop(name, None)


def test_checks_every_configuration_and_peer(script, tmp_path):
    out = tmp_path / "decode.json"
    assert script.main(["--tiny", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    peers = list(script.PEERS) if torch.cuda.is_available() else ["math"]
    variants = [*script.TINY_CONFIGS, *peers]
    found = [(row["shape"], row["variant"]) for row in record["rows"]]
    assert found == [(shape, variant) for shape in script.TINY for variant in variants]
    ours = [row["status"] for row in record["rows"] if row["variant"] not in script.PEERS]
    assert set(ours) == {"ok"}
    assert record["settings"]["heads"] == [4, 2]


def test_a_wrong_result_is_reported_and_fails_the_run(script, monkeypatch, capsys, tmp_path):
    exact = script.attention_decode

    def slightly_off(*args, **keywords):
        out, lse = exact(*args, **keywords)
        return out * 1.01, lse

    monkeypatch.setattr(script, "attention_decode", slightly_off)
    out = tmp_path / "decode.json"
    options = ["--tiny", "--shapes", script.TINY[0], "--configs", "default,plain"]
    assert script.main([*options, "--out", str(out)]) == 1
    assert f"NOT TIMED {script.TINY[0]} default: out: error is" in capsys.readouterr().out
    status = {row["variant"]: row["status"] for row in json.loads(out.read_text())["rows"]}
    assert status["plain"] == "ok"
    assert "allowed" in status["default"]


def test_check_sees_a_wrong_log_sum_exp(script):
    problem = script.Problem(script.TINY[0], (4, 2), torch.device("cpu"), torch.float32)
    out, lse = problem.computed(torch.float32)
    assert problem.wrong((out, lse)) == []
    (found,) = problem.wrong((out, lse + 1e-3))
    assert found.startswith("lse: error is 1.00e-03")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "B8-S1"], "shape is B8-S1, accepted as"),
        (["--shapes", "B1-L1-S64-D64-W8-F32"], "where a query sees no key"),
        (["--configs", "64x4"], "configuration is 64x4"),
        (["--heads", "12/8"], "heads are 12/8"),
    ],
)
def test_refuses_what_it_cannot_read(script, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.parse(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_reads_sizes_and_configurations(script):
    args = script.parse(["--heads", "8/2", "--rounds", "3", "--seconds", "9"])
    assert isinstance(args, argparse.Namespace)
    assert (args.heads, args.rounds, args.seconds) == ((8, 2), 3, 9.0)
    assert args.shapes == list(script.SHAPES)
    problem = script.Problem("B2-L4-S512-D32", (8, 2), torch.device("cpu"), torch.float32)
    default = script.choices_of("default", problem)
    assert script.choices_of("default/x3", problem).splits == 3 * default.splits
    chosen = script.choices_of("128x8x2/s5/tma", problem)
    assert chosen.tiles == (default.tiles.BM, 128, 8, 2)
    assert (chosen.splits, chosen.use_descriptors) == (5, True)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("B1-L1-S512-D16", 512), ("B1-L3-S512-D16-W40", 42), ("B1-L1-S512-D16-F70", 70)],
)
def test_counts_the_keys_and_values_that_are_seen(script, name, keys):
    problem = script.Problem(name, (4, 2), torch.device("cpu"), torch.bfloat16)
    assert problem.bytes_read == 2 * keys * 2 * 16 * 2
