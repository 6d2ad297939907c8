"""The rotation's launches against the oracle's definition of it."""

import pytest
import torch
from kernels.oracle import rotate

from inductor_gqa.kernels.plan import Attention, Operand, Plan, execute
from inductor_gqa.kernels.rotate import plan_adjoint, plan_rotation

B, L, S, K, R, D = 2, 37, 21, 2, 3, 32
SHAPES = {"q": (B, L, K, R, D), "k": (B, S, K, D)}


def given(names, W, device):
    """q, k and tables of the named ones; the halves of a table differ."""
    tensors = {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}
    tensors["v"] = tensors["k"]
    for name in names:
        for table in ("cos", "sin"):
            tensors[f"{table}_{name}"] = torch.randn(B, SHAPES[name][1], W, device=device)
    return tensors


def subject_of(tensors, **numbers):
    operands = {name: Operand.of(x) for name, x in tensors.items()}
    return Attention(operands, scale=1.0, capability=None, **numbers)


@pytest.mark.parametrize("names", ["q", "k", "qk"])
@pytest.mark.parametrize(
    ("W", "start", "interleaved"), [(32, 0, False), (16, 8, False), (16, 8, True), (32, 0, True)]
)
class TestTurns:
    def numbers(self, start, interleaved):
        return {"rope_start": start, "rope_interleaved": interleaved}

    def test_forward(self, names, W, start, interleaved, device):
        tensors = given(names, W, device)
        subject = subject_of(tensors, **self.numbers(start, interleaved))
        scratch, launches, slots = plan_rotation(subject)
        assert set(scratch) == {f"{name}_rotated" for name in names}
        made = execute(Plan(scratch, launches, tuple(slots[name] for name in names)), tensors)
        for name, y in zip(names, made, strict=True):
            table = (tensors[f"{x}_{name}"] for x in ("cos", "sin"))
            torch.testing.assert_close(y, rotate(tensors[name], *table, start, interleaved))

    def test_adjoint(self, names, W, start, interleaved, device):
        """<turn(x), y> = <x, adjoint(y)>: what autograd says the adjoint is."""
        tensors = given(names, W, device)
        subject = subject_of(tensors, **self.numbers(start, interleaved))
        gradients = {name: torch.randn(SHAPES[name], device=device) for name in names}
        sources = {name: f"d{name}_turned" for name in names}
        results = {name: f"d{name}" for name in names}
        launch = plan_adjoint(subject, sources, results)
        scratch = {f"d{name}": Operand.contiguous(SHAPES[name], torch.float32) for name in names}
        named = {**tensors, **{sources[name]: gradients[name] for name in names}}
        made = execute(Plan(scratch, (launch,), tuple(results.values())), named)
        for name, y in zip(names, made, strict=True):
            x = tensors[name].clone().requires_grad_()
            table = (tensors[f"{t}_{name}"] for t in ("cos", "sin"))
            rotate(x, *table, start, interleaved).backward(gradients[name])
            torch.testing.assert_close(y, x.grad)
