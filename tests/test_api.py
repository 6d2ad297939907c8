"""Switching the pass on and off leaves everything else as it was; reports say what happened."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from fused import BACKWARD, FORWARD, Seen, backend, results
from spellings import Attention, inputs
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_gqa
from inductor_gqa import passes, read_site
from inductor_gqa.passes import AttentionPass, NotFused, Settings

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_CPP = ROOT / "tests" / "without_cpp.py"


@pytest.fixture(autouse=True)
def _as_before():
    saved = inductor_config.joint_custom_pre_pass
    inductor_config.joint_custom_pre_pass = None
    torch._dynamo.reset()
    yield
    inductor_config.joint_custom_pre_pass = saved
    torch._dynamo.reset()


def compiled_graphs(module=None, train=False):
    """The graphs that a compile makes under the settings in force."""
    torch._dynamo.reset()
    seen, module = Seen(), module or Attention()
    with backend(seen) as chosen:
        results(torch.compile(module, backend=chosen), module, inputs(grad=False), train)
    return seen


class Named(CustomGraphPass):
    """Notes that it ran, and whether an attention was fused before."""

    def __init__(self, name="named"):
        self.name = name
        self.saw = []

    def __call__(self, graph):
        self.saw.append(any("inductor_gqa" in str(n.target) for n in graph.nodes))

    def uuid(self):
        return self.name


def test_enable_twice_is_enable_once():
    inductor_gqa.enable()
    first = inductor_config.joint_custom_pre_pass
    inductor_gqa.enable()
    second = inductor_config.joint_custom_pre_pass
    assert first.uuid() == second.uuid()
    assert second.before is None
    inductor_gqa.disable()
    assert inductor_config.joint_custom_pre_pass is None


def test_disable_without_enable_changes_nothing():
    own = Named()
    inductor_config.joint_custom_pre_pass = own
    inductor_gqa.disable()
    assert inductor_config.joint_custom_pre_pass is own


def test_enable_again_changes_the_settings():
    inductor_gqa.enable()
    inductor_gqa.enable(always=True, strict=True)
    settings = inductor_config.joint_custom_pre_pass.settings
    assert (settings.always, settings.strict) == (True, True)


def test_is_enabled():
    assert not inductor_gqa.is_enabled()
    inductor_gqa.enable()
    assert inductor_gqa.is_enabled()
    inductor_gqa.disable()
    assert not inductor_gqa.is_enabled()


def test_a_custom_pass_keeps_running_before_ours():
    own = Named()
    inductor_config.joint_custom_pre_pass = own
    inductor_gqa.enable(always=True)
    assert compiled_graphs().count(FORWARD) == 1
    assert own.saw == [False]
    inductor_gqa.disable()
    assert inductor_config.joint_custom_pre_pass is own


def test_a_plain_callable_keeps_running_before_ours():
    saw = []
    own = saw.append
    inductor_config.joint_custom_pre_pass = own
    inductor_gqa.enable(always=True)
    assert compiled_graphs().count(FORWARD) == 1
    assert len(saw) == 1
    assert inductor_config.joint_custom_pre_pass.uuid() is None
    inductor_gqa.disable()
    assert inductor_config.joint_custom_pre_pass is own


def test_a_list_of_passes_keeps_running_before_ours():
    own = [Named("a"), Named("b")]
    inductor_config.joint_custom_pre_pass = own
    inductor_gqa.enable(always=True)
    assert compiled_graphs().count(FORWARD) == 1
    assert [p.saw for p in own] == [[False], [False]]
    inductor_gqa.disable()
    assert inductor_config.joint_custom_pre_pass is own


def test_context_manager_restores_what_was_set():
    own = Named()
    inductor_config.joint_custom_pre_pass = own
    with inductor_gqa.enabled(always=True):
        assert inductor_gqa.is_enabled()
        with inductor_gqa.enabled(strict=True):
            assert inductor_config.joint_custom_pre_pass.before is own
        assert inductor_config.joint_custom_pre_pass.settings.always
    assert inductor_config.joint_custom_pre_pass is own


def test_context_manager_restores_after_an_error():
    with pytest.raises(ValueError, match="mine"), inductor_gqa.enabled():
        raise ValueError("mine")
    assert inductor_config.joint_custom_pre_pass is None


def test_graph_after_disable_is_the_stock_graph():
    stock = compiled_graphs(train=True)
    inductor_gqa.enable(always=True)
    fused = compiled_graphs(train=True)
    inductor_gqa.disable()
    after = compiled_graphs(train=True)
    assert (fused.count(FORWARD), fused.count(BACKWARD)) == (1, 1)
    assert fused.text() != stock.text()
    assert after.text() == stock.text()


def test_small_attentions_are_left_by_default_with_the_number_that_would_do():
    inductor_gqa.enable()
    seen = compiled_graphs()
    assert seen.count(FORWARD) == 0
    (reason,) = seen.reasons
    assert "scores per head are 121, accepted" in reason
    assert "enable(always=True)" in reason


def test_strict_mode_lists_the_sites_that_are_left():
    module = Attention(softmax=lambda s: torch.softmax(s, 1))
    with inductor_gqa.enabled(always=True, strict=True), pytest.raises(NotFused) as caught:
        compiled_graphs(module)
    text = str(caught.value)
    assert "left (inference): the softmax runs over dim 1 of 4, accepted the last" in text
    assert "test_api.py:" in text or "spellings.py:" in text


def test_strict_mode_is_silent_where_all_fuse():
    with inductor_gqa.enabled(always=True, strict=True):
        assert compiled_graphs().count(FORWARD) == 1


def test_a_softmax_that_is_no_attention_is_not_reported():
    class Classifier(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1), torch.softmax(x.sum(-1), -1) * 2

    with inductor_gqa.enabled(always=True, strict=True):
        assert compiled_graphs(Classifier()).sites == []


def test_uuid_changes_with_settings_precision_and_sources(monkeypatch):
    plain = AttentionPass(Settings()).uuid()
    assert plain == AttentionPass(Settings()).uuid()
    assert plain != AttentionPass(Settings(always=True)).uuid()
    assert plain != AttentionPass(Settings(strict=True)).uuid()
    assert plain != AttentionPass(Settings(), Named()).uuid()
    assert (
        AttentionPass(Settings(), Named("a")).uuid() != AttentionPass(Settings(), Named("b")).uuid()
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = AttentionPass(Settings()).uuid()
    torch.set_float32_matmul_precision("high")
    fast = AttentionPass(Settings()).uuid()
    torch.set_float32_matmul_precision(before)
    assert exact != fast
    monkeypatch.setattr(passes, "source_digest", lambda: "other sources")
    assert plain != AttentionPass(Settings()).uuid()


def test_digest_covers_readers_ops_and_kernels(monkeypatch):
    read = []
    plain = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self.name) or plain(self))
    passes.source_digest.__wrapped__()
    assert {"ops.py", "attention.py", "gradients.py", "forward.py", "backward.py", "cpu.py"} <= set(
        read
    )


def test_explain_shows_place_and_summary_and_changes_nothing():
    module = Attention()
    report = inductor_gqa.explain(module, *inputs())
    assert (report.fused, report.left) == (1, 0)
    (site,) = report.sites
    assert site.place.startswith("spellings.py:")
    assert site.direction == "training"
    text = str(report)
    assert "4 query / 2 key-value heads of 8, rotate-half RoPE" in text
    assert text.endswith("1 fused, 0 left")
    assert json.loads(report.to_json())["fused"] == 1
    assert inductor_config.joint_custom_pre_pass is None


def test_explain_shows_why_a_site_is_left():
    module = Attention(softmax=lambda s: torch.softmax(s, 1))
    report = inductor_gqa.explain(module, *inputs(grad=False))
    assert (report.fused, report.left) == (0, 1)
    assert "the softmax runs over dim 1 of 4, accepted the last" in str(report)
    report = inductor_gqa.explain(Attention(), *inputs(), always=False)
    assert "accepted" in report.sites[0].reason


def test_explain_of_something_without_attention():
    report = inductor_gqa.explain(torch.sin, torch.ones(3))
    assert str(report) == "no attention found"


def test_explain_can_be_asked_many_times():
    """Every call compiles anew, also past Dynamo's limit of recompiles of one function."""
    modules = [Attention(scale=0.1 * n) for n in range(1, 12)]
    assert [inductor_gqa.explain(m, *inputs(grad=False)).fused for m in modules] == [1] * len(
        modules
    )


def test_explain_in_training_reads_the_backward_and_under_no_grad_does_not():
    assert "backward of q, k, v" in inductor_gqa.explain(Attention(), *inputs()).sites[0].summary
    with torch.no_grad():
        (site,) = inductor_gqa.explain(Attention(), *inputs()).sites
    assert (site.direction, site.has_backward) == ("inference", False)


def test_log_has_the_records(caplog):
    with caplog.at_level(logging.INFO, "inductor_gqa"), inductor_gqa.enabled(always=True):
        compiled_graphs()
        compiled_graphs(Attention(softmax=lambda s: torch.softmax(s, 1)))
    text = [r.getMessage() for r in caplog.records if r.name == "inductor_gqa"]
    assert any("fused (inference): 4 query / 2 key-value heads of 8" in line for line in text)
    assert any("left (inference): the softmax runs over dim 1" in line for line in text)


def test_log_is_silent_by_default(caplog):
    with caplog.at_level(logging.WARNING, "inductor_gqa"), inductor_gqa.enabled(always=True):
        compiled_graphs()
    assert not [r for r in caplog.records if r.name == "inductor_gqa"]


def test_an_error_in_a_reader_leaves_the_site(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("broken reader")

    stock = compiled_graphs()
    monkeypatch.setattr(read_site, "read", broken)
    with inductor_gqa.enabled(always=True), caplog.at_level(logging.WARNING, "inductor_gqa"):
        seen = compiled_graphs()
    assert "internal error while reading: ZeroDivisionError" in seen.reasons[0]
    assert seen.text() == stock.text()
    assert "it is left as it is" in caplog.text


CACHES = """
import sys
import torch, torch._inductor.config as config
import inductor_gqa
from torch._dynamo.utils import counters

def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.3, -1) @ v

q = torch.randn(1, 2, 16, 8)
expected = attention(q, q, q)

def used():
    torch._dynamo.reset()
    out, (code,) = torch._inductor.utils.run_and_get_code(torch.compile(attention), q, q, q)
    torch.testing.assert_close(out, expected)
    return "inductor_gqa.attention" in code

for word in sys.argv[1:]:
    inductor_gqa.enable(always=True) if word == "on" else inductor_gqa.disable()
    print(used(), counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_caches_never_mix_fused_and_stock_graphs(tmp_path):
    """On, off and on in one process, then both in a second that finds the caches warm."""
    script = tmp_path / "caches.py"
    script.write_text(CACHES)
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }

    def process(*words):
        command = [sys.executable, "-W", "ignore", str(WITHOUT_CPP), str(script), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines()]
        return [used == "True" for used, _ in rows], int(rows[-1][1])

    assert process("on", "off", "on")[0] == [True, False, True]
    used, hits = process("off", "on")
    assert used == [False, True]
    assert hits > 0, "the second process found no warm cache"
