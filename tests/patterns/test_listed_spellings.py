"""Spellings of models, packages and benchmark suites beside those of `test_wild.py`: masks of
packed sequences and of chosen keys, rotations with a scale of their own, whole layers, backwards by
hand.
"""

import pytest
import torch
import torch.nn.functional as F
from fused import GIVEN, fuses, leaves, never_wrong
from spellings import Attention, half, half_table_other_order, inputs, partial, softmax_fp32
from torch import nn

MIN = torch.finfo(torch.bfloat16).min  # which every dtype here can hold
both_ways = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])


# Masks


def of_packed_sequences(positions):
    """Transformers: a sequence begins where the position is not the one before and one."""
    first = positions[:, :1] - 1
    differs = torch.diff(positions, prepend=first, dim=-1) != 1
    return differs.cumsum(-1)


def packed(visible):
    def mask(self, s):
        n = s.shape[-1]
        positions = torch.cat((torch.arange(n - 5), torch.arange(5)))[None].expand(s.shape[0], n)
        ids = of_packed_sequences(positions)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        keep = visible(i, j)[None] & (ids[:, :, None] == ids[:, None, :])
        return s + torch.where(keep[:, None], 0.0, MIN).to(s.dtype)

    return mask


def blocks(self, s):
    """Pixtral: zeros are written into blocks of a mask that hides everything."""
    n = s.shape[-1]
    mask = torch.full((n, n), MIN)
    for start, end in ((0, 4), (4, 9), (9, n)):
        mask[start:end, start:end] = 0
    return s + mask[None, None].to(s.dtype)


def gathered_padding(self, s):
    """Transformers: the 2-D mask of the tokens is looked up by the indices of keys and batch."""
    B, n = s.shape[0], s.shape[-1]
    real = torch.arange(n)[None] >= torch.arange(B)[:, None]
    b, j = torch.arange(B)[:, None, None, None], torch.arange(n)[None, None, None, :]
    i = torch.arange(n)[None, None, :, None]
    return s.masked_fill(~((j <= i) & real[b, j]), MIN)


def of_chosen_keys(self, s):
    """DeepSeek 3.2: an indexer of its own chooses keys; the others are hidden by scattering."""
    n = s.shape[-1]
    relevance = (torch.arange(n)[:, None] * 7 + torch.arange(n)[None] * 5) % 13
    relevance = relevance.float().masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    chosen = relevance.topk(4, -1).indices
    hidden = torch.full((n, n), MIN).scatter(-1, chosen, 0.0)
    return s + (hidden + torch.full((n, n), MIN / 2).triu(1)).to(s.dtype)


MASKS = {
    "packed, causal": (packed(lambda i, j: j <= i), "causal"),
    "packed, window": (packed(lambda i, j: (j <= i) & (i - j < 4)), "window"),
    "packed, chunks": (packed(lambda i, j: (j <= i) & (i // 4 == j // 4)), ""),
    "packed, both directions": (packed(lambda i, j: (j <= i) | (j >= i)), ""),
    "blocks": (blocks, ""),
    "gathered padding": (gathered_padding, "causal"),
    "chosen keys": (of_chosen_keys, ""),
}


@both_ways
@pytest.mark.parametrize("name", MASKS)
def test_fuses_mask(name, train):
    mask, summary = MASKS[name]
    seen = fuses(Attention(mask=mask), *inputs(), train=train)
    assert "rotate-half RoPE" in seen.summary
    assert summary in seen.summary


# Rotations with a scale of their own


def decay(length, power):
    """xPos: lanes of q grow by position as those of k shrink."""
    base = (torch.arange(4.0) + 4) / 8
    grown = base ** (torch.arange(length)[:, None] / 8 * power)
    return torch.cat((grown, grown), -1)


class XPos(Attention):
    """x-transformers and rotary-embedding-torch."""

    def rotated(self, x, length):
        scale = decay(length, 1.0 if x.shape[1] == self.H else -1.0)
        cos, sin = self.cos[:length], self.sin[:length]
        x1, x2 = x.chunk(2, -1)
        return (x * cos * scale) + (torch.cat((-x2, x1), -1) * sin * scale)


class ScaledByOne(Attention):
    """rotary-embedding-torch without xPos: the scale is a number."""

    def rotated(self, x, length):
        cos, sin = self.cos[:length], self.sin[:length]
        x1, x2 = x.chunk(2, -1)
        return (x * cos * 1.0) + (torch.cat((-x2, x1), -1) * sin * 1.0)


class ScaledBefore(Attention):
    """ESM: q is scaled, then it turns, and the scores are scaled by 1."""

    def rotated(self, x, length):
        return super().rotated(x * 0.35 if x.shape[1] == self.H else x, length)

    def __init__(self, **options):
        super().__init__(scale=1.0, **options)


class SplitScale(Attention):
    """The square root of the scale on q and on k, then 1 on the scores."""

    def rotated(self, x, length):
        return super().rotated(x, length) * 0.3**0.5

    def __init__(self, **options):
        super().__init__(scale=1.0, **options)


class LlamaScaled(Attention):
    """torchtune: Llama 3.1's frequencies, chosen by their wave length, in a cache of pairs."""

    def rotated(self, x, length):
        freqs = 10.0 ** (-torch.arange(0, 8, 2) / 8)
        waves = 2 * torch.pi / freqs
        smooth = (16 / waves - 1) / 3
        mixed = (1 - smooth) * freqs / 8 + smooth * freqs
        freqs = torch.where(waves < 8, freqs, torch.where(waves > 32, freqs / 8, mixed))
        at = torch.outer(torch.arange(length).float(), freqs)
        cache = torch.stack((at.cos(), at.sin()), -1)[None, None]
        pairs = x.float().reshape(*x.shape[:-1], 4, 2)
        a, b, c, s = pairs[..., 0], pairs[..., 1], cache[..., 0], cache[..., 1]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(3).type_as(x)


class UnitLength(Attention):
    """x-transformers: q and k of length one after they turned, and a scale of 10."""

    def __init__(self, **options):
        super().__init__(scale=10.0, **options)

    def attend(self, q, k, v):
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
        return super().attend(q, k, v)


class LearnedScale(Attention):
    """x-transformers again: the scale, or a bias of each head, is a parameter."""

    def __init__(self, shape, **options):
        super().__init__(**options)
        self.learned = nn.Parameter(torch.full(shape, 0.3, dtype=self.wq.dtype))

    def attend(self, q, k, v):
        s = self.grouping.scores(q, k)
        s = s + self.learned if self.learned.dim() else s * self.learned
        return self.grouping.out(self.softmax(s), v)


@pytest.mark.parametrize("shape", [(), (4, 1, 11), (4, 11, 11)], ids=str)
def test_a_learned_scale_or_bias_is_left_by_name(shape):
    reason = "the gradient of the scores is needed beside those of q, k and v"
    leaves(LearnedScale(shape), *inputs(), reason_contains=reason)
    fuses(LearnedScale(shape), *inputs(), train=False)


class MemoryKeys(Attention):
    """x-transformers: learned keys and values before those of the tokens."""

    def __init__(self, **options):
        super().__init__(**options)
        self.memory = nn.Parameter(torch.linspace(-1, 1, 2 * 2 * 3 * 8).view(2, 1, 2, 3, 8))

    def attend(self, q, k, v):
        k, v = (
            torch.cat((m.expand(x.shape[0], -1, -1, -1).to(x.dtype), x), 2)
            for m, x in zip(self.memory, (k, v), strict=True)
        )
        return super().attend(q, k, v)


LAYERS = {
    "xPos": (XPos, ""),
    "scaled by one": (ScaledByOne, "rotate-half RoPE"),
    "scaled before": (ScaledBefore, "rotate-half RoPE"),
    "split scale": (SplitScale, "rotate-half RoPE"),
    "Llama 3.1": (LlamaScaled, "interleaved RoPE"),
    "unit length": (UnitLength, ""),
    "memory": (MemoryKeys, "no mask"),
    "groups of 12": (lambda: Attention(H=24, K=2), "24 query / 2 key-value heads"),
    "head dim 96": (
        lambda: Attention(D=96, scale=0.1, rotation=half_table_other_order),
        "rotate-half RoPE",
    ),
    "head dim 160": (lambda: Attention(D=160, scale=0.08), "rotate-half RoPE"),
    "a quarter turns": (
        lambda: Attention(D=16, rotation=lambda x, c, s: partial(x, c, s, 4)),
        "rotate-half RoPE on 4 lanes",
    ),
}


@both_ways
@pytest.mark.parametrize("name", LAYERS)
def test_fuses_layer(name, train):
    make, summary = LAYERS[name]
    assert summary in fuses(make(), *inputs(), train=train).summary


class WholeLayer(Attention):
    """Projections as `x @ w.t()` with biases, sections of three position grids, division by the
    root of the head dim."""

    def __init__(self, **options):
        super().__init__(H=14, K=2, **options)
        self.bias = nn.Parameter(torch.linspace(-1, 1, (14 + 2 + 2) * 8).to(self.wq.dtype))
        self.scores = lambda s: s / self.D**0.5

    def forward(self, x):
        wide = x @ torch.cat((self.wq, self.wk, self.wv)).t() + self.bias
        q, k, v = wide.split([14 * 8, 2 * 8, 2 * 8], -1)
        cos, sin = (self.sections(t, x.shape[1]) for t in (self.cos, self.sin))
        q, k, v = self.heads(q, 14), self.heads(k, 2), self.heads(v, 2)
        return self.attend(half(q, cos, sin), half(k, cos, sin), v)

    @staticmethod
    def sections(table, length):
        grids = torch.stack([table[k : k + length] for k in (0, 3, 7)])[:, None]
        parts = grids.split([2, 1, 1] * 2, -1)
        return torch.cat([part[k % 3] for k, part in enumerate(parts)], -1).unsqueeze(1)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fuses_whole_layer(dtype, train):
    module = WholeLayer(mask=MASKS["gathered padding"][0], dtype=dtype)
    seen = fuses(module, *inputs(dtype=dtype), train=train, scores=(11, 11))
    assert "14 query / 2 key-value heads of 8, rotate-half RoPE, causal" in seen.summary


# Backwards by hand


def softmax_gradient(p, dp):
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def turned_back(g, cos, sin):
    a, b = g.chunk(2, -1)
    return g * cos + torch.cat((-b, a), -1) * (-sin)


def repeated(x):
    return x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)


def summed(x):
    return x.unflatten(1, (-1, 2)).sum(2)


def voxtral(p, q, k, v, grad, cos, sin):
    """Saved weights and repeated keys and values; the scores' gradient is divided in fp32, then
    rounded; the rotation is undone with a negated sine."""
    dp = torch.matmul(grad, v.transpose(-1, -2))
    ds = softmax_gradient(p.float(), dp.float()) / 8**0.5
    ds = ds.to(q.dtype)
    dq, dk = torch.matmul(ds, k), torch.matmul(ds.transpose(-1, -2), q)
    dv = torch.matmul(p.transpose(-1, -2).to(grad.dtype), grad)
    return turned_back(dq, cos, sin), turned_back(summed(dk), cos, sin), summed(dv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fuses_backward_of_saved_weights(dtype):
    make = torch.Generator().manual_seed(3)
    p = torch.softmax(torch.randn(2, 4, 11, 11, generator=make), -1)
    q, k, v, grad = (torch.randn(2, 4, 11, 8, generator=make) for _ in range(4))
    cos, sin = (torch.randn(11, 8, generator=make) for _ in range(2))
    given = [x.to(dtype) for x in (p, q, k, v, grad, cos, sin)]
    seen = never_wrong(voxtral, *given, train=False, left=None)
    assert seen.count(GIVEN) == 1
    assert "rotate-half RoPE" in seen.summary


def rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)


def rms_gradient(g, x, w):
    """Gradients of x and of w."""
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    g_hat = g * (1 + w)
    dx = r * (g_hat - x * r * r * (g_hat * x).mean(-1, keepdim=True))
    return dx, (g * x * r).sum((0, 1, 2))


def gemma(q, k, v, wq, wk, grad):
    """The forward computed once more, with a softcap, between norms of q and k whose gradients are
    written out."""
    qn, kn = rms(q, wq), repeated(rms(k, wk))
    vr = repeated(v)
    bent = torch.tanh(torch.matmul(qn, kn.mT) * 0.3 / 5.0)
    p = torch.softmax(bent * 5.0, -1)
    ds = softmax_gradient(p, grad @ vr.mT) * (1 - bent.pow(2)) * 0.3
    dq, dwq = rms_gradient(ds @ kn, q, wq)
    dk, dwk = rms_gradient(summed(ds.mT @ qn), k, wk)
    return dq, dk, summed(p.mT @ grad), dwq, dwk


@pytest.mark.parametrize("frozen", ["", "v", "q"])
def test_fuses_backward_between_norms(frozen):
    """The weights are computed once more, and their product with the values is not."""

    def some(*given):
        dq, dk, dv, dwq, dwk = gemma(*given)
        kept = {"q": (dq, dwq), "k": (dk, dwk), "v": (dv,)}
        return [x for name, found in kept.items() if name not in frozen for x in found]

    make = torch.Generator().manual_seed(5)
    q, grad = (torch.randn(2, 4, 11, 8, generator=make) for _ in range(2))
    k, v = (torch.randn(2, 2, 11, 8, generator=make) for _ in range(2))
    wq, wk = (torch.rand(8, generator=make) - 0.5 for _ in range(2))
    fuses(some, q, k, v, wq, wk, grad, train=False, backwards=1, scores=(11, 11))


@pytest.mark.parametrize("order", ["cast, then scaled", "scaled, then cast", "all in fp32"])
@pytest.mark.parametrize("where", ["gradient", "weights"])
def test_dropout_in_a_backward_by_hand_is_left_by_name(order, where):
    """The mask multiplies the gradient of the weights; what is saved are the weights before it."""

    def fragment(p, q, k, v, grad, keep):
        dp = grad.float() @ repeated(v).float().mT
        dp = dp * keep / 0.9 if where == "gradient" else torch.where(keep, dp, 0.0) * (1 / 0.9)
        ds = softmax_gradient(p.float(), dp)
        if order == "cast, then scaled":
            ds = (ds.to(q.dtype) * 0.3).float()
        elif order == "scaled, then cast":
            ds = (ds * 0.3).to(q.dtype).float()
        else:
            ds = ds * 0.3
        dk = summed(ds.mT @ q.float())
        return (ds @ repeated(k).float()).to(q.dtype), dk.to(k.dtype)

    make = torch.Generator().manual_seed(7)
    p = torch.softmax(torch.randn(2, 4, 11, 11, generator=make), -1)
    q, grad = (torch.randn(2, 4, 11, 8, generator=make) for _ in range(2))
    k, v = (torch.randn(2, 2, 11, 8, generator=make) for _ in range(2))
    keep = torch.rand(2, 4, 11, 11, generator=make) > 0.1
    given = [x.bfloat16() for x in (p, q, k, v, grad)]
    seen = leaves(fragment, *given, keep, train=False, reason_contains="dropout")
    assert len(seen.sites) == 1


# A loss on the weights, beside the output


@pytest.mark.parametrize("dropped", [False, True], ids=["as they are", "dropped"])
def test_a_loss_on_the_weights_is_left_by_name(dropped):
    class Returning(Attention):
        def attend(self, q, k, v):
            p = softmax_fp32(self.grouping.scores(q, k) * self.scale)
            p = F.dropout(p, 0.1) if dropped else p
            return self.grouping.out(p, v).transpose(1, 2).flatten(2), p.mean(1)

    with torch._inductor.config.patch(fallback_random=True):
        leaves(Returning(), *inputs(), reason_contains="the attention weights are returned")
