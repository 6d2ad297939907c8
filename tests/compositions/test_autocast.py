"""autocast: the casts that it inserts are nodes like others."""

import pytest
import torch
from fused import BACKWARD, FORWARD, fuses
from spellings import Attention, inputs, rotate_half


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], torch.finfo(s.dtype).min)


class Autocast(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        kind = torch.bfloat16 if self.inner.wq.dtype is not torch.float64 else torch.float64
        with torch.autocast("cpu", dtype=kind, enabled=kind is torch.bfloat16):
            return self.inner(*args)


def normed(x, cos, sin):
    """RMSNorm before the rotation, which autocast leaves in fp32 while the values are bf16."""
    x = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],)).to(
        torch.promote_types(x.dtype, cos.dtype)
    )
    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_fuses_under_autocast(train):
    module = Autocast(Attention(mask=causal))
    seen = fuses(module, *inputs(), train=train)
    assert seen.node_of(FORWARD).args[0].meta["val"].dtype is not torch.float64


def test_fuses_queries_that_autocast_leaves_in_fp32():
    seen = fuses(Autocast(Attention(rotation=normed, mask=causal)), *inputs())
    assert seen.count(BACKWARD) == 1


def test_fuses_bf16_weights_under_autocast():
    fuses(Autocast(Attention(mask=causal, dtype=torch.bfloat16)), *inputs(dtype=torch.bfloat16))


def test_autocast_around_the_compiled_function():
    def run(x):
        module = modules[x.dtype]
        kind = torch.bfloat16 if x.dtype is torch.float32 else torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is torch.bfloat16):
            return module(x)

    modules = {torch.float32: Attention(), torch.float64: Attention().double()}
    fuses(run, *inputs())
