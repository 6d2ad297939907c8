"""No kernel reads or writes beside its tensors, with the tiles that a GPU gets."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.attentions import cases
from kernels.bounds import checked_addresses
from triton.runtime.errors import InterpreterError

from inductor_gqa.kernels.backward import plan_backward
from inductor_gqa.kernels.forward import collect, plan_forward
from inductor_gqa.kernels.plan import Launch, Operand, Plan
from inductor_gqa.kernels.prepare import delta_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is needed")


@given(data=st.data())
def test_attention_stays_within_its_tensors(data):
    case = data.draw(cases("cpu", widths=(64, 72, 80, 96), longest=80))
    tensors = {"q": case.q, "k": case.k, "v": case.v, **case.keywords}
    numbers = {n: x for n, x in case.keywords.items() if not isinstance(x, torch.Tensor)}
    tensors = {n: x for n, x in tensors.items() if isinstance(x, torch.Tensor)}
    given_tensors, attention = collect(tensors, numbers)
    with checked_addresses() as execute:
        attention = dataclasses.replace(attention, capability=(9, 0))
        out, lse = execute(plan_forward(attention), given_tensors)
        more = {"grad_out": case.grad_out, "out": out, "lse": lse}
        given_tensors, attention = collect(tensors | more, numbers)
        attention = dataclasses.replace(attention, capability=(9, 0))
        for use_descriptors in (False, None):
            execute(plan_backward(attention, use_descriptors=use_descriptors), given_tensors)


def test_a_kernel_that_is_told_of_too_many_rows_is_caught():
    out = torch.ones(1, 16, 1, 1, 16)
    strides = dict(zip("blkre", Operand.of(out).strides, strict=True))
    scalars = {f"stride_grad_out_{x}": n for x, n in strides.items()}
    scalars |= {"B": 1, "L": 17, "K": 1, "R": 1, "E": 16, "E1": 16, "E2": 0, "BM": 32}
    slots = {"out_ptr": "q", "grad_out_ptr": "q", "delta_ptr": "delta"}
    launch = Launch(delta_kernel, (1,), slots, scalars, num_warps=4, num_stages=1)
    delta = {"delta": Operand.contiguous((1, 1, 1, 32), torch.float32)}
    with checked_addresses() as execute, pytest.raises((IndexError, InterpreterError)):
        execute(Plan(delta, (launch,), ("delta",)), {"q": out})
