"""The saved page as a browser shows it, light and dark, wide and narrow. Runs where Chromium is
installed."""

import browser
import pytest
import torch
from spellings import Attention, inputs

import inductor_gqa
from inductor_gqa.report import Details, Record, Report

SCHEMES = ("light", "dark")
WIDTHS = (1280, 400)
LOWEST_CONTRAST = 4.5  # of text on its background (WCAG AA)

CONTRASTS = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return getComputedStyle(at).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll(".igqa *:not(style)")].map((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """One kind of site that is fused and one that is left, with long lines in both."""
    fused = inductor_gqa.explain(Attention(), *inputs(L=64))
    left = inductor_gqa.explain(Attention(softmax=lambda s: torch.softmax(s, 1)), *inputs(L=64))
    out = tmp_path_factory.mktemp("page") / "page.html"
    long = "no_place_to_break_a_line_" * 8
    odd = Record(long, False, long, long, "training", False, details=Details(source=long))
    Report([*fused.sites * 2, *left.sites, odd]).save(out, "a report with a long title " * 3)
    return out


@pytest.fixture(scope="module")
def opened(page, tmp_path_factory):
    if browser.find() is None:
        pytest.skip("needs Chromium")
    with browser.Browser(tmp_path_factory.mktemp("profile")) as chromium:
        chromium.open(page)
        yield chromium


def test_the_browser_has_nothing_to_complain_of(opened):
    assert opened.complaints == []


def test_nothing_but_the_page_itself_is_asked_for(opened, page):
    assert opened.requests == [page.resolve().as_uri()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fits_its_window_and_is_legible(opened, scheme, width):
    opened.show_as(scheme, width)
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    ratios = opened.evaluate(CONTRASTS)
    assert len(ratios) > 50
    assert min(ratios) >= LOWEST_CONTRAST


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_whole_window_has_the_colour_of_the_scheme(opened, scheme):
    """A page that is dark in the middle of a white frame looks broken."""
    opened.show_as(scheme, 1280)
    box = "document.querySelector('.igqa').getBoundingClientRect()"
    assert opened.evaluate(f"[{box}.left, {box}.top]") == [0, 0]
    style = "getComputedStyle(document.querySelector('.igqa')).backgroundColor"
    shade = int(opened.evaluate(style).split("(")[1].split(",")[0])
    assert (shade > 128) == (scheme == "light")


def test_sites_unfold_by_a_click(opened):
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    opened.evaluate("document.querySelector('summary').click()")
    assert opened.evaluate("document.querySelector('details').open")
    assert "Before: " in opened.evaluate("document.querySelector('details').innerText")


def test_no_script_can_run_and_nothing_can_be_fetched(opened):
    """What the policy in the page forbids, tried: the page is the last line of defence for text
    that comes from a user's code."""
    script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
    opened.evaluate(f"void document.body.append({script})")
    assert opened.evaluate("window.ran === undefined")
    asked = "fetch('data:,x').then(() => 'fetched', () => 'refused')"
    answer = opened.call("Runtime.evaluate", expression=asked, awaitPromise=True)
    assert answer["result"]["value"] == "refused"
