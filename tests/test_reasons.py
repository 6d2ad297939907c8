"""Why an attention was left, for whoever has to act on it: each reason says what is accepted, and a
report takes at most three lines a site, whatever model it is of."""

import ast
from pathlib import Path

import pytest
import torch

import inductor_gqa
from inductor_gqa.report import Record, Report

ROOT = Path(__file__).resolve().parents[1]
# Reasons of verify.py and of an internal error say what went wrong in a check of ours.
SILENT = {"verify.py"}
READERS = [p for p in sorted((ROOT / "patterns").glob("*.py")) if p.name not in SILENT]
OURS = [p for p in sorted((ROOT / "inductor_gqa").glob("*.py")) if p.name not in SILENT]
LONGEST = 3  # lines of a site


def messages(path: Path) -> list[str]:
    """What the file raises as `Unread`, as source text."""
    calls = [
        node.exc
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    named = [call for call in calls if getattr(call.func, "id", "") == "Unread"]
    return [ast.unparse(call.args[0]) for call in named]


def test_readers_give_reasons():
    assert sum(len(messages(path)) for path in READERS) > 80


@pytest.mark.parametrize("path", [*READERS, *OURS], ids=lambda path: path.name)
def test_every_reason_says_what_is_accepted(path):
    bare = [text for text in messages(path) if "accepted" not in text]
    assert [text for text in bare if "internal error" not in text] == []


def check(report: Report) -> None:
    """Three lines a site, none broken, with all details of what was fused."""
    for site in report.sites:
        assert 2 <= len(site.lines) <= LONGEST
        assert not any("\n" in line for line in site.lines)
        assert site.details.source
        if site.fused:
            assert site.details.words
            assert site.details.reading
            assert site.details.flops
            assert all("accepted" in note for note in site.notes)
        else:
            assert site.reason is not None
            assert "accepted" in site.reason
            assert site.details.stays
    kinds = report.alike()
    totals = 2 if report.score_bytes else 1
    assert len(str(report).splitlines()) <= LONGEST * len(kinds) + totals


NAMES = (
    "llama",
    "gemma2",  # softcap, two kinds of layers
    "gpt_neox",  # q, k and v side by side in each head
    "gptj",  # one table of sines and cosines
    "cohere",  # neighbours
    "gpt_oss",  # sinks
    "deepseek_v3",  # latent keys, wider heads in q than in v
    "persimmon",  # a norm with a bias before the rotation
    "bert",  # no rotation, not causal
    "bloom",  # ALiBi
)
TWO_KINDS = ("gemma2", "gpt_oss")  # of layers, of which a small model has one each


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["inference", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_report_of_an_architecture(name, direction):
    pytest.importorskip("transformers")
    from inductor_gqa.cli.architectures import TINY, causal_lm

    torch._dynamo.reset()
    kinds = 2 if name in TWO_KINDS else 1
    model, smaller = (
        causal_lm(name, TINY | {"num_hidden_layers": n}).train(direction == "training")
        for n in (2, kinds)
    )
    ids = torch.arange(64).view(2, 32)
    named = {"input_ids": ids, "use_cache": False, "attention_mask": (ids != 63).long()}
    with torch.set_grad_enabled(direction == "training"):
        fused = inductor_gqa.explain(model, **named)
        left = inductor_gqa.explain(smaller, **named, always=False)
    assert (fused.fused, fused.left) == (2, 0)
    assert (left.fused, left.left) == (0, kinds)  # too small to pay
    check(fused)
    check(left)
    for site in left.sites:
        assert "scores per head are 1024, accepted 262144 or more on cpu" in (site.reason or "")


def test_a_reason_that_spans_lines_stays_one_line():
    site = Record("a.py:1", False, "", "an error\nof two lines", "training", False)
    assert [line for line in site.lines if "\n" in line] == []
