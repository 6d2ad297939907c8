"""The plots are made from the committed results, and from results with a green check only."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("plot")
    for name in ("plot", "readme"):
        sys.modules.pop(name, None)


def test_bars_are_the_committed_numbers(plot):
    found = plot.results()
    labels, heights = plot.bars(found)
    assert len(labels) == len(found) > 0
    for index, result in enumerate(found):
        fused = result["variants"]["fused"]
        expected = (fused["step_ms"], fused["peak_bytes"] / 2**30)
        assert heights["fused"][index] == expected


def test_a_result_without_a_green_check_is_not_drawn(plot):
    (first, *_) = plot.results()
    with pytest.raises(plot.CommandError, match="no green check"):
        plot.bars([{**first, "check": {"ok": False}}])


def test_says_that_it_needs_matplotlib(plot, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main(["--out", str(tmp_path / "a.svg")]) == 3
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


def test_writes_a_figure(plot, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.svg"
    assert plot.main(["--out", str(out)]) == 0
    assert "<svg" in out.read_text()
