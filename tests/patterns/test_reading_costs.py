"""Reading is paid at compile time for every layer. What it costs is counted in elements that are
read, so that the machine does not matter.
"""

from fused import run
from spellings import Attention, inputs

from inductor_gqa.patterns import elements, gradients
from inductor_gqa.patterns.values import ValueNumbers


class ReturnsKeys(Attention):
    """The turned keys are a result as well, as of a cache: their rotation stays outside."""

    def attend(self, q, k, v):
        return super().attend(q, k, v), k


def elements_read(monkeypatch, module, train=True):
    """How many elements were followed, and what was seen."""
    count = 0
    read = elements.Elements._read

    def counted(self, node, position):
        nonlocal count
        count += 1
        return read(self, node, position)

    monkeypatch.setattr(elements.Elements, "_read", counted)
    seen = run(module, *inputs(), train=train)
    assert (seen.fused, seen.reasons) == (1, [])
    return count, seen


def test_returned_keys_are_not_read_once_for_each_attempt(monkeypatch):
    """With all rotations inside, with that of q alone, with none: the attempts share their
    reading."""
    plain, _ = elements_read(monkeypatch, Attention())
    monkeypatch.undo()
    returned, seen = elements_read(monkeypatch, ReturnsKeys())
    assert "(q only)" in seen.summary
    assert returned < 1.25 * plain


def calls_of(monkeypatch, owner, name):
    """What a function was called with, from here on."""
    calls = []
    function = getattr(owner, name)

    def counted(*args):
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_the_gradient_of_the_scores_is_proven_once_for_q_and_k(monkeypatch):
    proofs = calls_of(monkeypatch, gradients, "_proven")
    seen = run(Attention(), *inputs())
    assert "backward of q, k, v" in seen.summary
    assert len(proofs) == 1


def test_values_are_numbered_once_a_graph(monkeypatch):
    numbered = calls_of(monkeypatch, ValueNumbers, "__init__")
    assert run(ReturnsKeys(), *inputs()).fused == 1
    assert len(numbered) == 1
