"""What is missing or broken is said once, and never ends a user's program: stock graph at compile
time, plain PyTorch at run time."""

import importlib.util
import logging

import pytest
import torch
from fused import FORWARD, Seen, backend, results, wrong
from spellings import Attention, inputs

import inductor_gqa
from inductor_gqa import NotFused, decide, fallback, lowering, ops, passes


def compiled(module, args, **options):
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        ours = results(torch.compile(module, backend=chosen, **options), module, args, True)
    wide = Attention().double()
    truth = results(wide, wide, [x.detach().double().requires_grad_() for x in args], True)
    assert not wrong(ours, results(module, module, args, True), truth)
    return seen


class OnGpu:
    """As much of a site as decide.py looks at."""

    q = k = v = None
    head_dim = value_dim = 64
    scale_tensor = None
    anchor = type("Anchor", (), {})()


OnGpu.anchor.meta = {"val": type("Value", (), {"device": torch.device("cuda", 0)})()}


def refused(monkeypatch, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    decide._broken_kernels.cache_clear()
    try:
        return decide.unsupported(OnGpu)
    finally:
        decide._broken_kernels.cache_clear()


def test_a_gpu_that_is_supported(monkeypatch):
    assert refused(monkeypatch) is None


def test_an_old_gpu_is_left_with_its_capability(monkeypatch):
    expected = "compute capability is 7.5, accepted 8.0 or higher"
    assert refused(monkeypatch, (7, 5)) == expected


def test_amd_is_left(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert refused(monkeypatch) == "the GPU is one of AMD's, accepted NVIDIA"


def test_triton_is_missing(monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "triton" else plain(name, *a)
    )
    assert refused(monkeypatch) == "Triton is not installed"


def test_triton_is_broken(monkeypatch):
    def broken(name):
        raise ImportError("libtriton.so: undefined symbol")

    monkeypatch.setattr(decide.importlib, "import_module", broken)
    assert "Triton is broken, importing the kernels raises" in refused(monkeypatch)
    assert "undefined symbol" in refused(monkeypatch)


def broken_kernel(*args):
    raise RuntimeError("out of resource: shared memory")


def test_a_kernel_that_raises_is_replaced_by_the_reference(caplog):
    run = fallback.or_reference(broken_kernel, ops._reference, "attention")
    tensors = [torch.randn(1, 7, 2, 2, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)]
    given = dict.fromkeys(ops.NAMES) | {"scale": 0.3, "softcap": 0.0, "fill_adds": False}
    given |= {"rope_start": 0, "rope_interleaved": False, "keep_scale": 1.0, "precision": "ieee"}
    args = [*tensors, *(given[name] for name in ops.NAMES[3:])]
    with caplog.at_level(logging.WARNING, "inductor_gqa"):
        first, second = run(*args), run(*args)
    assert caplog.text.count("attention: the kernel failed with RuntimeError('out of resource") == 1
    expected = ops.attention(*args)
    for found in (first, second):
        torch.testing.assert_close(found, expected)


def test_other_calls_keep_the_kernel():
    """A kernel that does not compile for one shape says nothing of another."""
    tried = []

    def kernel(x):
        tried.append(len(x))
        if len(x) == 1:
            raise RuntimeError("ptxas failed")
        return x + 1

    run = fallback.or_reference(kernel, lambda x: x - 1, "attention")
    one, two = torch.zeros(1), torch.zeros(2)
    assert [float(run(x)[0]) for x in (two, one, two, one)] == [1, -1, 1, -1]
    assert tried == [2, 1, 2]


def test_lists_of_tensors_are_told_apart_by_shape():
    """They were by their numbers, so that no failed call was known again."""
    tried = []

    def kernel(x, weights):
        tried.append([len(w) for w in weights])
        raise RuntimeError("no shared memory")

    run = fallback.or_reference(kernel, lambda x, weights: x, "linear_forward")
    for _ in range(2):
        for n in (1, 2):
            run(torch.randn(3), [torch.randn(n), torch.randn(3)])
    assert tried == [[1, 3], [2, 3]]


def test_a_kernel_that_always_fails_is_given_up():
    tried = []

    def kernel(x):
        tried.append(len(x))
        raise RuntimeError("no shared memory")

    run = fallback.or_reference(kernel, lambda x: x, "attention")
    for n in range(2 * fallback.MOST):
        run(torch.zeros(n))
    assert len(tried) == fallback.MOST


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_is_raised(error):
    def failing(*args):
        raise error("the device")

    run = fallback.or_reference(failing, lambda *args: 1 / 0, "attention")
    with pytest.raises(error, match="the device"):
        run()


def test_a_backward_kernel_that_raises_is_replaced_by_the_reference():
    run = fallback.or_reference(broken_kernel, ops._reference_backward, "attention_backward")
    q, k, v = torch.randn(1, 7, 2, 2, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    given = dict.fromkeys(ops.NAMES) | {"scale": 0.3, "softcap": 0.0, "fill_adds": False}
    given |= {"rope_start": 0, "rope_interleaved": False, "keep_scale": 1.0, "precision": "ieee"}
    args = [q, k, v, *(given[name] for name in ops.NAMES[3:])]
    out, lse = ops.attention(*args)
    found = run(out, out, lse, True, False, True, *args)
    expected = ops.attention_backward(out, out, lse, True, False, True, *args)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_the_gpu_ops_have_a_reference_behind_them():
    for name in ("attention", "attention_backward", "attention_weights", "weights_backward"):
        kernel = f"inductor_gqa::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "CUDA")
    assert ops.or_reference is fallback.or_reference


def test_an_error_in_the_search_leaves_the_graph(monkeypatch, caplog):
    def broken(graph):
        raise ZeroDivisionError("broken search")

    monkeypatch.setattr(passes, "softmaxes", broken)
    monkeypatch.setattr(passes, "row_sums", broken)
    assert compiled(Attention(), inputs()).count(FORWARD) == 0
    assert "searching the graph, so that nothing is fused, failed" in caplog.text


def test_an_error_while_writing_leaves_the_site(monkeypatch, caplog):
    """Nodes that were written before it are gone again."""
    stock = Seen()
    with backend(stock) as chosen:
        torch.compile(Attention(), backend=chosen)(*inputs()).sum().backward()
    torch._dynamo.reset()

    def broken(*args):
        raise ZeroDivisionError("broken writer")

    write, sizes = passes._write, []

    def counted(site, graph, *rest):
        before = len(graph.nodes)
        try:
            return write(site, graph, *rest)
        finally:
            sizes.append((before, len(graph.nodes)))

    monkeypatch.setattr(passes, "_write", counted)
    monkeypatch.setattr(passes.rewrite, "_write_backward", broken)
    seen = compiled(Attention(), inputs())
    assert [before == after for before, after in sizes] == [True]
    assert seen.reasons == ["internal error while writing: ZeroDivisionError('broken writer')"]
    assert seen.text() == stock.text()
    assert "writing the ops failed" in caplog.text


def test_an_error_while_describing_is_no_error(monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("broken summary")

    monkeypatch.setattr(passes, "describe", broken)
    assert compiled(Attention(), inputs()).count(FORWARD) == 1


def test_a_lowering_that_fails_stays_a_call():
    def planned(*args):
        raise KeyError("moved")

    assert lowering._lowered(planned, lambda *args: args, 1, 2) == (1, 2)


def test_strict_mode_raises_its_own_error():
    """Not BackendCompilerFailed, whose first line is the backend's name."""
    module = Attention(softmax=lambda s: torch.softmax(s, 1))
    with inductor_gqa.enabled(always=True, strict=True), pytest.raises(NotFused) as caught:
        torch.compile(module)(*inputs())
    assert type(caught.value) is NotFused
    first = str(caught.value).splitlines()[0]
    assert first.endswith("left (training): the softmax runs over dim 1 of 4, accepted the last")
