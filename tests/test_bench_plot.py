"""The README's list, table and figures are made from the committed results and from what runs, and
from results with a green check only."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("training.svg", "programs.svg", "memory.svg", "speed.svg")


def texts(svg: str) -> list[str]:
    return ["".join(x.itertext()) for x in ElementTree.fromstring(svg).iter() if "text" in x.tag]


def test_there_is_a_result_for_every_figure(bench):
    plot = bench("plot")
    assert set(plot.figures()) == set(FIGURES)
    for benchmark in ("train_step", "seeds", "attention-core"):
        assert plot.found(benchmark)


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figure_is_what_the_results_make(bench, name):
    made = bench("plot").figures()[name]
    assert (ROOT / "docs" / "figures" / name).read_text() == made, "run `python bench/plot.py`"


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_sound_and_names_its_units(bench, name):
    found = texts(bench("plot").figures()[name])
    units = {"training.svg": "ms", "programs.svg": "floor", "memory.svg": "MiB"}
    assert any(text.endswith(units.get(name, "TFLOP/s")) for text in found)


def test_figures_fetch_nothing_and_have_a_dark_side(bench):
    for svg in bench("plot").figures().values():
        assert re.findall(r'https?://[^"\s]*', svg) == ["http://www.w3.org/2000/svg"]
        assert "prefers-color-scheme: dark" in svg


def test_bars_are_the_committed_numbers(bench):
    plot = bench("plot")
    found = texts(plot.training(plot.steps()))
    for result in plot.steps():
        for variant in result["variants"].values():
            if variant["status"] == "ok":
                value = variant["step_ms"]
                assert (f"{value:.0f}" if value >= 100 else f"{value:.1f}") in found
    bars = [r["variants"].get(name, {}) for r in plot.steps() for name in plot.VARIANTS]
    statuses = [bar.get("status", "not run") for bar in bars]
    for shown, status in (("not run", "not run"), ("memory", "out of memory")):
        assert found.count(shown) == 2 * statuses.count(status)  # in time and in memory
    assert set(statuses) <= {"ok", "not run", "out of memory"}


def test_height_of_a_bar_is_its_value(bench):
    svg = bench("svg")
    parts = svg.bars("a", "ms", ["x", "y"], {"one": [25.0, 100.0]}).parts
    heights = [float(h) for part in parts for h in re.findall(r'<rect.* height="([\d.]+)"', part)]
    assert heights == [svg.HEIGHT / 4, svg.HEIGHT]


def test_floor_is_drawn_at_its_height(bench):
    svg = bench("svg")
    panel = svg.bars("a", "x", ["x"], {"one": [4.0]}, floor=1.0)
    (line,) = [part for part in panel.parts if 'class="floor"' in part]
    assert f'y1="{svg.TOP + svg.HEIGHT * 0.75:.1f}"' in line


@pytest.mark.parametrize("highest", [0.03, 0.9, 1.0, 3.3, 27.3, 328.0, 660.9, 1080.0])
def test_ticks_are_few_and_reach_the_highest(bench, highest):
    ticks = bench("svg").ticks_to(highest)
    assert ticks[0] == 0
    assert ticks[-2] < highest <= ticks[-1]
    assert 4 <= len(ticks) <= 6


def test_a_result_without_a_green_check_is_not_drawn(bench, monkeypatch):
    plot = bench("plot")
    (first, *_) = plot.found("train_step")
    bad = {**first, "check": {"ok": False}}
    monkeypatch.setattr(plot, "found", lambda benchmark: [bad])
    with pytest.raises(plot.CommandError, match="no green check"):
        plot.steps()
    assert bench("readme").main([]) == 1


def test_a_wrong_case_of_a_program_is_not_drawn(bench):
    plot = bench("plot")
    (record,) = plot.found("seeds")
    record["cases"][0]["variants"]["fused"]["ok"] = False
    with pytest.raises(plot.CommandError, match="no green check"):
        plot.programs([record])


def test_a_figure_that_differs_is_named(bench, monkeypatch, tmp_path, capsys):
    plot = bench("plot")
    monkeypatch.setattr(plot, "FIGURES", tmp_path)
    assert plot.main(["--check"]) == 1
    assert "docs/figures/training.svg: differs" in capsys.readouterr().out
    assert plot.main([]) == 0
    assert plot.main(["--check"]) == 0


@pytest.mark.parametrize("region", ["speed", "programs"])
def test_figures_of_the_readme_are_made_from_the_committed_results(bench, region):
    readme = bench("readme")
    assert readme.shown(region) == readme.REGIONS[region](), "run `python bench/readme.py`"


def test_a_shape_that_was_wrong_is_not_shown(bench, monkeypatch):
    plot, readme = bench("plot"), bench("readme")
    (record,) = plot.found("attention")
    next(row for row in record["rows"] if row["variant"] == "ours")["status"] = "wrong"
    monkeypatch.setattr(plot, "found", lambda name: [record])
    with pytest.raises(plot.CommandError, match="no green check"):
        readme.alone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["rotary embeddings", "heads", "scores", "masks", "gradients", "all"]
)
def test_the_list_of_what_is_recognised_is_what_is(bench, group):
    """Each word of the list stands for an attention that fuses, in inference and in training."""
    readme, recognised = bench("readme"), bench("recognised")
    lines = dict(line[2:].split(": ", 1) for line in readme.shown("recognised").splitlines())
    if group == "all":
        assert list(lines) == list(recognised.GROUPS)
        return
    for name, (function, inputs) in recognised.GROUPS[group].items():
        assert recognised.status(name, function, inputs) == ""
    assert lines[group] == ", ".join(recognised.GROUPS[group]), "run `python bench/readme.py`"


def test_a_spelling_that_does_not_fuse_is_listed_with_what_is_missing(bench):
    recognised = bench("recognised")
    over_queries = recognised.attention(softmax=lambda s: s.softmax(dim=-2))
    missing = recognised.status("x", over_queries, recognised.heads)
    assert missing == "not in inference, not in training"
