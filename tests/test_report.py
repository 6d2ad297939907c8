"""What a report tells of a site: costs, reading, operations, and a page that is safe to open."""

from html.parser import HTMLParser

import pytest
import torch
from spellings import Attention, inputs, interleaved, partial

import inductor_gqa
from inductor_gqa import report
from inductor_gqa.report import Details, Record, Report

B, H, K, L, D = 2, 4, 2, 11, 8  # what inputs() makes
SCORES = B * H * L * L


def explained(module=None) -> Record:
    (site,) = inductor_gqa.explain(module or Attention(), *inputs()).sites
    return site


def causal(scores):
    L, S = scores.shape[-2:]
    return scores.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), -torch.inf)


def windowed(scores):
    i, j = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])
    return scores.masked_fill((j > i) | (j < i - 3), -torch.inf)


def finite(scores):
    return scores.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -1e9)


class Returning(torch.nn.Module):
    """Gives the weights back as well."""

    def forward(self, q, k, v):
        weights = torch.softmax(q @ k.mT * 0.3, -1)
        return weights @ v, weights


class Page(HTMLParser):
    """Tags, attributes and text; refuses tags that do not close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def explained_forward() -> Details:
    with torch.no_grad():
        return explained().details


def test_counts_the_score_matrices_that_matmuls_write_or_read():
    forward, both = explained_forward(), explained().details
    assert (forward.score_matrices, forward.score_bytes) == (2, 2 * SCORES * 4)
    assert (both.score_matrices, both.score_bytes) == (4, 4 * SCORES * 4)


def test_counts_matrices_in_the_dtype_of_each_matmul():
    def attention(q, k, v):
        return torch.softmax(q.float() @ k.float().mT * 0.3, -1).bfloat16() @ v

    q, k, v = (torch.randn(1, 2, 7, 8).bfloat16() for _ in range(3))
    (site,) = inductor_gqa.explain(attention, q, k, v).sites
    assert site.details.score_bytes == 2 * 7 * 7 * (4 + 2)


def test_weights_that_are_returned_stay():
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    (site,) = inductor_gqa.explain(Returning(), q, k, v).sites
    assert "returns the weights" in site.summary
    assert (site.details.score_matrices, site.details.score_bytes) == (1, 2 * 7 * 7 * 4)


def test_flops_are_those_of_the_models_matmuls():
    assert explained_forward().flops == 2 * SCORES * 2 * D
    assert explained().details.flops == 3 * 2 * SCORES * 2 * D


@pytest.mark.parametrize("dynamic", [False, True])
def test_flops_equal_what_torch_counts_in_eager(dynamic):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    if dynamic:
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 2)

    def attention(q, k, v):
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    with FlopCounterMode(display=False) as counted:
        attention(q, k, v).sum().backward()
    (site,) = inductor_gqa.explain(attention, q, k, v).sites
    assert site.details.flops == counted.get_total_flops()


def test_tells_the_share_inside_a_causal_band():
    def attention(q, k, v):
        return torch.softmax(causal(q @ k.mT * 0.3), -1) @ v

    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    (site,) = inductor_gqa.explain(attention, q, k, v).sites
    assert site.details.visible == 36 / 64
    assert "56% of the scores inside the band" in str(site.lines)


def test_a_site_that_was_left_says_so_in_its_first_line_and_why_in_the_second():
    left = explained(Attention(softmax=lambda s: torch.softmax(s, 1)))
    fused = explained()
    assert (left.fused, fused.fused) == (False, True)
    assert " left (training): " in left.lines[0]
    assert left.lines[1].strip() == "the softmax runs over dim 1 of 4, accepted the last"
    assert " fused (training): " in fused.lines[0]
    assert left.reason not in " ".join(fused.lines)
    found = Report([left, fused])
    assert (found.fused, found.left) == (1, 1)


def test_reading_names_axes_lanes_and_results():
    reading = dict(explained().details.reading)
    assert f"K={K}" in reading["axes"]
    assert "lanes 0 to 7, in pairs of t and t+4" in reading["q turned"]
    assert {"q", "k", "v", "makes the output", "makes dq", "makes dk", "makes dv"} <= set(reading)


def test_operations_before_have_the_softmax_and_after_have_ours():
    details = explained().details
    assert any("aten.exp.default" in line for line in details.gone)
    assert not any("inductor_gqa" in line for line in details.gone)
    assert sum("inductor_gqa.attention.default" in line for line in details.come) == 1
    assert sum("inductor_gqa.attention_backward.default" in line for line in details.come) == 1


def test_words_say_what_each_dim_counts_and_what_turns():
    """In sentences what `reading` says in axes: q and k share q's heads in groups of two."""
    said = explained(Attention(mask=lambda module, s: causal(s))).details.words
    assert f"Batch {B}, {H} query heads of {D} lanes; 2 of them share one of {K}" in said[0]
    assert said[1].startswith("q is ")
    assert "[batch x query, query head x lane]" in said[1]
    assert "[batch x key, key-value head x lane]" in said[2]
    assert "[batch x key, key-value head x value lane]" in said[3]
    text = " ".join(said)
    assert "lanes 0 to 7 turn in pairs, t with t+4 (halves)" in text
    assert "Query i sees keys up to its own position." in text
    assert said[-1].endswith("and the gradients of q, k and v.")


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Attention(H=2, K=2), "Batch 2, 2 heads of 8 lanes. 11 queries, 11 keys."),
        (Attention(rotation=None), "Nothing is rotated inside."),
        (Attention(rotate_k=False), "Of q, lanes 0 to 7 turn"),
        (Attention(rotation=interleaved), "2t with 2t+1 (neighbours)"),
        (Attention(rotation=partial), ", the other 4 pass;"),
        (Attention(value_dim=4), "query heads of 8 lanes (4 in the values)"),
        (Attention(scores=lambda s: torch.tanh(s / 20) * 20), "then softly capped at 20"),
        (Attention(mask=lambda _, s: windowed(s)), "keys from i - 3 on"),
        (Attention(mask=lambda _, s: finite(s)), "A hidden score becomes -1e+09"),
        (Attention(), "Every query sees every key."),
        (Attention(mask=lambda _, s: s + s.new_ones(L, L)[:, :1] * 2), "Added to the scores: "),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_words_tell_of_what_is_special(module, sentence):
    site = explained(module)
    assert site.fused, site.reason
    assert sentence in " ".join(site.details.words)


def test_words_tell_of_weights_that_are_returned():
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    (site,) = inductor_gqa.explain(Returning(), q, k, v).sites
    assert "The weights are needed as well and are written once" in " ".join(site.details.words)


def test_words_tell_of_a_backward_from_given_weights():
    def backward(dO, P, q, k, v):
        dP = dO @ v.mT
        dS = 0.3 * P * (dP - (P * dP).sum(-1, keepdim=True))
        return dS @ k, dS.mT @ q, P.mT @ dO

    P = torch.rand(1, 2, 7, 7)
    dO, q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(4))
    (site,) = inductor_gqa.explain(backward, dO, P, q, k, v).sites
    assert site.fused, site.reason
    text = " ".join(site.details.words)
    assert "The weights are given: " in text
    assert text.endswith("Replaced: the gradients of q, k and v.")


def test_a_site_that_is_left_changes_no_operation():
    site = explained(Attention(softmax=lambda s: torch.softmax(s, 1)))
    assert not site.fused
    ends = [line for line in site.details.stays if "aten.bmm.default" in line]
    assert any("aten.exp.default" in line for line in site.details.stays)
    assert len(ends) >= 2  # from the matmul before the softmax to the one behind it
    assert site.details.source
    assert (site.details.gone, site.details.come) == ((), ())


def test_a_plain_compile_pays_for_no_details():
    q = torch.randn(1, 2, 7, 8)
    torch._dynamo.reset()
    with inductor_gqa.enabled(always=True), report.collected() as found:
        torch.compile(lambda q: torch.softmax(q @ q.mT, -1) @ q, backend="inductor")(q)
    (site,) = found.sites
    assert site.details == Details()


def test_reports_that_are_equal_are_told_apart_when_one_ends():
    with report.collected() as outer, report.collected():
        pass
    with report.collected() as first:
        with report.collected():
            pass
        report.add(Record("a.py:1", True, "", None, "inference", False))
    assert (len(outer.sites), len(first.sites)) == (0, 1)


def test_sites_that_read_the_same_are_printed_once():
    record = Record("a.py:1", True, "4 heads of 8", None, "inference", False)
    text = str(Report([record] * 16))
    assert text.splitlines()[0].startswith("16 x a.py:1 fused (inference)")
    assert text.endswith("16 fused, 0 left")


def test_page_is_whole_and_fetches_nothing(tmp_path):
    found = inductor_gqa.explain(Attention(), *inputs())
    found.save(tmp_path / "page.html", title="mine")
    page = parsed((tmp_path / "page.html").read_text())
    text = "".join(page.text)
    assert page.links == []
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    for expected in ("mine", "aten.exp.default", "inductor_gqa.attention", "lanes 0 to 7"):
        assert expected in text
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in text
    assert "@import" not in text


def test_page_escapes_what_a_user_wrote():
    evil = "<script>alert('x')</script>\"&"
    ops = (evil, f"a: {evil} = aten.bmm.default({evil})")
    both = Details(source=evil, words=(evil,), reading=((evil, evil),), gone=ops, come=ops)
    records = [
        Record(evil, True, evil, None, evil, False, details=both, notes=(evil,)),
        Record(evil, False, "", evil, evil, False, details=Details(stays=ops)),
    ]
    page = parsed(Report(records)._repr_html_())
    assert "script" not in page.tags
    parts = 2 * 3 + 3  # a site's place, direction and words for it; a note, the source, a reason
    parts += 1 + 1 + 2 + 3 * 3  # recognised, a sentence, a line of the table, three lists
    assert "".join(page.text).count(evil) == parts


def test_notebook_shows_a_report_without_sites():
    assert "no attention found" in "".join(parsed(Report()._repr_html_()).text)
