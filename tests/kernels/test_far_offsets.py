"""Elements that lie more than 2^31 elements from the first of their tensor: dense masks of long
sequences do.

https://github.com/pytorch/pytorch/issues/147585: a backward failed once L * S passed 2^31.
https://github.com/ml-explore/mlx/issues/2894: a forward was silently wrong.
"""

import dataclasses
import mmap

import pytest
import torch
from kernels.oracle import Case, errors_of
from kernels.test_weights_backward import Case as Given
from kernels.test_weights_backward import errors_of as given_errors
from kernels.weights_cases import errors_of as weights_errors

from inductor_gqa.kernels.backward import attention_backward
from inductor_gqa.kernels.choice import attention_forward as chosen_forward
from inductor_gqa.kernels.decode import Choices, attention_decode
from inductor_gqa.kernels.forward import attention_forward
from inductor_gqa.kernels.weights_backward import weights_backward
from inductor_gqa.kernels.weights_forward import weights_forward

ROW, HEAD = 2**26, 2**30  # elements from one to the next: forty rows, or three heads, pass 2^31
RESERVES_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000)


def far_apart(x, dim, device):
    """Equal values, `dim` with a stride of ROW or HEAD. Only pages that are written take memory."""
    step = HEAD if x.shape[dim] == 3 else ROW
    size = (x.shape[dim] * step + x[0].numel()) * x.dtype.itemsize
    if device == "cuda":
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | RESERVES_NOTHING
        buffer = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    strides = list(x.movedim(dim, 0).contiguous().movedim(0, dim).stride())
    strides[dim] = step
    view = buffer.view(x.dtype).as_strided(x.shape, strides)
    return view.copy_(x)


def case_with(name, device, dim=3):
    """An attention of 40 queries and keys whose tensor of this name is spread out: the positions,
    or for what [B, K, R, L, S] belongs to scores the heads (`dim` 2)."""
    make = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=make).to(device)  # noqa: E731
    q, k, v, grad_out = (noise(1, 40, 1, n, 16) for n in (3, 1, 1, 3))
    case = Case(q, k[:, :, :, 0], v[:, :, :, 0], {"scale": 0.3}, grad_out)
    pattern = noise(1, 1, 3, 40, 40)
    if name == "mask":
        case.keywords["mask"] = far_apart(
            (pattern > -1) | (pattern == pattern[..., :1]), dim, device
        )
    elif name == "bias":
        case.keywords["bias"] = far_apart(pattern.bfloat16(), dim, device)
    elif name == "keep":
        case.keywords |= {"keep": far_apart(pattern > -0.8, dim, device), "keep_scale": 1.25}
    elif name == "key_mask":
        case.keywords["key_mask"] = far_apart(pattern[0, 0, 0, :1] > -1, 1, device)
    elif name in ("cos_q", "cos_k"):
        tables = {n: noise(1, 40, 16).cos() for n in ("cos_q", "sin_q", "cos_k", "sin_k")}
        case.keywords |= tables | {name: far_apart(tables[name], 1, device)}
    elif name != "none":
        spread = far_apart(getattr(case, name).bfloat16(), 1, device)
        narrow = {n: getattr(case, n).bfloat16() for n in ("q", "k", "v", "grad_out")}
        case = dataclasses.replace(case, **narrow | {name: spread})
    return case


SCORES = [(name, dim) for name in ("mask", "bias", "keep") for dim in (3, 2)]
ROWS = [(name, 3) for name in ("key_mask", "q", "k", "v", "cos_q", "cos_k")]


@pytest.mark.parametrize(("name", "dim"), [*SCORES, *ROWS, ("grad_out", 3)])
def test_forward_and_backward_reach_the_last_row(name, dim, device):
    case = case_with(name, device, dim)
    inputs = (case.q, case.k, case.v)
    run = chosen_forward if device == "cuda" else attention_forward
    out, lse = run(*inputs, **case.keywords)
    dq, dk, dv = attention_backward(case.grad_out, *inputs, out, lse, **case.keywords)
    ours = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert errors_of(case, ours) == []


@pytest.mark.parametrize(("name", "dim"), [*SCORES, *ROWS])
def test_decode_reaches_the_last_row(name, dim, device):
    case = dataclasses.replace(case_with(name, device, dim), grad_out=None)
    out, lse = attention_decode(case.q, case.k, case.v, choices=Choices(splits=3), **case.keywords)
    assert errors_of(case, {"out": out, "lse": lse}) == []


@pytest.mark.parametrize(("name", "dim"), [*SCORES[:4], *ROWS])
def test_weights_are_returned_to_the_last_row(name, dim, device):
    case = case_with(name, device, dim)
    made = weights_forward(case.q, case.k, case.v, **case.keywords)
    assert weights_errors(case, made) == []


@pytest.mark.parametrize("at", range(5), ids=["grad_out", "weights", "q", "k", "v"])
def test_given_weights_are_read_to_the_last_row(at, device):
    make = torch.Generator().manual_seed(at)
    shapes = ((1, 40, 2, 16), (1, 2, 40, 40), *[(1, 40, 2, 16)] * 3)
    tensors = [torch.randn(*shape, generator=make).bfloat16().to(device) for shape in shapes]
    tensors[at] = far_apart(tensors[at], 2 if at == 1 else 1, device)
    case = Given(tuple(tensors), {"scale": 0.3, "group": 2})
    assert given_errors(case, weights_backward(*case.inputs, **case.keywords)) == []
