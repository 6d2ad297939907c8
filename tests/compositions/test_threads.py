"""Several threads that compile at once; torch keeps Inductor's settings per thread, so each calls
`enable()`."""

import threading

import torch
from fused import FORWARD, Seen, backend, wrong
from spellings import Attention, inputs

import inductor_gqa
from inductor_gqa import report


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def in_threads(*work):
    failures = []

    def guarded(run):
        try:
            run()
        except BaseException as why:  # to be seen by the test
            failures.append(why)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_threads_that_compile_at_once():
    """Each thread gets its own numbers right, and every site is reported once."""
    seen = Seen()
    outs = {}
    with backend(seen) as chosen:

        def work(n):
            module = Attention(H=4, K=2, D=8, scale=0.1 * (n + 1), mask=causal)
            compiled = torch.compile(module, backend=chosen)
            (x,) = inputs(seed=n, grad=False)
            with inductor_gqa.enabled(always=True):
                compiled(x)
            outs[n] = (compiled(x).detach(), module(x).detach(), module.double()(x.double()))

        in_threads(*(lambda n=n: work(n) for n in range(4)))
    for ours, eager, truth in outs.values():
        assert not wrong({"o": ours}, {"o": eager}, {"o": truth})
    assert len(outs) == 4
    assert (seen.fused, seen.count(FORWARD)) == (4, 4)


def test_records_of_threads_are_complete():
    record = report.Record("a.py:1", True, "", None, "inference", False)
    with report.collected() as found:
        in_threads(*[lambda: [report.add(record) for _ in range(200)]] * 4)
    assert found.fused == 800
