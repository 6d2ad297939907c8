"""Attentions as whole regions in the spellings of models, packages and benchmark suites that people
run: each fuses, in inference and in training, with its rotation inside the kernel where one
rotation describes it.
"""

import pytest
import torch
import torch.nn.functional as F
from fused import fuses
from spellings import (
    Attention,
    angles,
    half,
    half_table,
    half_table_other_order,
    inputs,
    interleaved,
    interleaved_in_halves_out,
    partial,
    repeat_kv,
    softmax_fp32,
)
from torch import nn

MIN = torch.finfo(torch.bfloat16).min  # which every dtype here can hold
WILD = {}


def wild(summary, **options):
    """Registers a module class; summary: what the report must say of it."""

    def register(cls):
        WILD[cls.__name__] = (cls, summary, options)
        return cls

    return register


def added_causal(self, s):
    n, m = s.shape[-2:]
    keep = torch.arange(m)[None] <= torch.arange(n)[:, None]
    return s + torch.where(keep, 0.0, MIN)[None, None].to(s.dtype)


def padded_causal(self, s):
    n, m = s.shape[-2:]
    keep = torch.arange(m)[None] <= torch.arange(n)[:, None]
    real = torch.arange(m)[None] >= torch.arange(s.shape[0])[:, None]
    keep = keep[None, None] & real[:, None, None]
    return s + torch.where(keep, 0.0, MIN).to(s.dtype)


def normed(x, weight=None):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide if weight is None else wide * (1.0 + weight.float())).type_as(x)


class Causal(Attention):
    def __init__(self, **options):
        super().__init__(**{"mask": padded_causal, **options})


@wild("rotate-half RoPE, causal + key padding")
class Llama(Causal):
    pass


@wild("rotate-half RoPE, causal + key padding")
class Olmo(Causal):
    """x2 is sliced and negated before x1 is sliced; rotated in fp32 by promotion, cast back."""

    def rotated(self, x, length):
        cos, sin = self.cos[:length].double(), self.sin[:length].double()
        x2 = -x[..., x.shape[-1] // 2 :]
        turned = torch.cat((x2, x[..., : x.shape[-1] // 2]), -1)
        return ((x * cos) + (turned * sin)).to(x.dtype)


@wild("interleaved RoPE, causal + key padding")
class Cohere(Causal):
    def rotated(self, x, length):
        wide, cos, sin = x.float(), self.cos[:length].float(), self.sin[:length].float()
        return interleaved(wide, cos, sin).to(x.dtype)


@wild("interleaved RoPE on 4 lanes, causal + key padding")
class Glm4(Causal):
    """The table's first half, each column twice; half of the lanes turn."""

    def rotated(self, x, length):
        cos, sin = (t[:length, None, :2].transpose(0, 1) for t in (self.cos, self.sin))
        cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
        turned, rest = x[..., :4], x[..., 4:]
        return torch.cat([interleaved(turned, cos, sin), rest], -1)


@wild("interleaved RoPE on 4 lanes, causal + key padding", K=4)
class GptJ(Causal):
    """One table of sines and cosines, looked up by position; scores from fp32 q and k."""

    def rotated(self, x, length):
        table = torch.cat((self.sin[:, :2], self.cos[:, :2]), -1)
        ids = torch.arange(length)[None].expand(x.shape[0], -1)
        sin, cos = torch.split(table[ids], 2, dim=-1)
        cos, sin = (t[:, None].repeat_interleave(2, 3) for t in (cos, sin))
        return torch.cat([interleaved(x[..., :4], cos, sin), x[..., 4:]], -1).to(torch.float32)


@wild("rotate-half RoPE, causal + key padding, sinks")
class GptOss(Causal):
    def __init__(self, **options):
        super().__init__(rotation=half_table, **options)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, self.H).to(self.wq.dtype))

    def attend(self, q, k, v):
        s = padded_causal(self, self.grouping.scores(q, k) * self.scale)
        column = self.sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)
        s = torch.cat([s, column], -1)
        s = s - s.max(-1, keepdim=True).values
        p = F.softmax(s, -1, dtype=s.dtype)[..., :-1]
        return self.grouping.out(p, v).transpose(1, 2).flatten(2)


@wild("rotate-half RoPE, no mask, sinks")
class SinkInFront(Attention):
    """x-transformers and others put the sink before the keys."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, self.H).to(self.wq.dtype))

    def attend(self, q, k, v):
        s = self.grouping.scores(q, k) * self.scale
        column = self.sinks.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
        p = F.softmax(torch.cat([column, s], -1), -1)[..., 1:]
        return self.grouping.out(p, v).transpose(1, 2).flatten(2)


@wild("interleaved RoPE, causal + key padding")
class PrivacyFilter(Causal):
    def __init__(self, **options):
        super().__init__(rotation=interleaved_in_halves_out, **options)


@wild("rotate-half RoPE, no mask")
class Reka(Attention):
    def __init__(self, **options):
        super().__init__(rotation=half_table_other_order, **options)


@wild("(values 4), no RoPE inside, causal + key padding", K=4, value_dim=4)
class DeepSeek(Causal):
    """MLA: the rotated part of k is one for all heads and written into k by slice assignment."""

    def forward(self, x):
        L = x.shape[1]
        q = self.heads(F.linear(x, self.wq), self.H)
        k = self.heads(F.linear(x, self.wk), self.K)
        v = self.heads(F.linear(x, self.wv), self.K)
        cos, sin = self.cos[:L, :4], self.sin[:L, :4]
        parts = q.split([4, 4], -1)
        q = torch.cat((parts[0], interleaved_in_halves_out(parts[1], cos, sin)), -1)
        shared = interleaved_in_halves_out(k[:, :1, :, 4:], cos, sin)
        keys = k.new_empty(k.shape)
        keys[..., :4] = k[..., :4]
        keys[..., 4:] = shared
        return self.attend(q, keys, v)


@wild("no RoPE inside, no mask", D=16)
class GemmaVision(Attention):
    """Two axes: each half of the lanes turns by its own table."""

    def rotated(self, x, length):
        cos, sin = self.cos[:length], self.sin[:length]
        parts = zip(x.split([8, 8], -1), cos.split([8, 8], -1), sin.split([8, 8], -1), strict=True)
        return torch.cat([half(*part) for part in parts], -1)


@wild("interleaved RoPE on 12 lanes, no mask", D=16)
class VJepa(Attention):
    """Three runs of lanes turn, each by positions of its own, the rest passes."""

    def rotated(self, x, length):
        done = []
        for k in range(3):
            part, cos, sin = (t[..., 4 * k : 4 * k + 4] for t in (x, self.cos, self.sin))
            y1, y2 = part.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((-y2, y1), -1).flatten(-2)
            done.append(part * cos[:length] + turned * sin[:length])
        return torch.cat([*done, x[..., 12:]], -1)


@wild("rotate-half RoPE on 4 lanes, causal + key padding")
class Bamba(Causal):
    def __init__(self, **options):
        super().__init__(rotation=partial, **options)


@wild("rotate-half RoPE, causal + key padding")
class NormedBefore(Causal):
    """Qwen3, Gemma3: q and k are normalised, by 1 + weight, before they turn."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norms = nn.ParameterList(torch.linspace(-0.2, 0.2, self.D) for _ in range(2))

    def rotated(self, x, length):
        return super().rotated(normed(x, self.norms[x.shape[1] == self.K]), length)


@wild("no RoPE inside, causal + key padding")
class NormedAfter(Causal):
    """Hunyuan."""

    def rotated(self, x, length):
        return normed(super().rotated(x, length))


@wild("no RoPE inside, causal + key padding")
class NormedWithoutRotation(Causal):
    def rotated(self, x, length):
        return normed(x)


@wild("rotate-half RoPE, causal + key padding")
class NormedValues(Causal):
    """Gemma 3n."""

    def attend(self, q, k, v):
        return super().attend(q, k, normed(v))


@wild("rotate-half RoPE, causal + key padding")
class NormedProjections(Causal):
    """Olmo 3: over the whole projection, before it is cut into heads."""

    def heads(self, x, n):
        return super().heads(normed(x), n)


@wild("rotate-half RoPE, causal + key padding")
class Clipped(Causal):
    def heads(self, x, n):
        return super().heads(x.clamp(-1.5, 1.5), n)


@wild("rotate-half RoPE, causal + key padding")
class Tempered(Causal):
    """Ministral 3: q is scaled by its position after it has turned."""

    def attend(self, q, k, v):
        t = 1 + 0.1 * torch.log1p(torch.floor(torch.arange(q.shape[2]).float() / 4))
        return super().attend((q * t[:, None]).to(q.dtype), k, v)


@wild("rotate-half RoPE, causal + key padding, softcap 5")
class Gemma2(Causal):
    def __init__(self, **options):
        super().__init__(scores=lambda s: torch.tanh(s * 0.4 / 5.0) * 5.0, **options)


@wild("rotate-half RoPE, causal + key padding")
class FalconH1(Causal):
    """A multiplier on k beside the scale on the scores."""

    def attend(self, q, k, v):
        return super().attend(q, k * 0.7, v)


@wild("rotate-half RoPE, causal", K=4)
class NeoXJapanese(Attention):
    """The scale is the matmul's alpha, the mask is added to its result."""

    def attend(self, q, k, v):
        B, H, L, D = q.shape
        q, k = (x.reshape(B * H, L, D) for x in (q, k))
        zero = torch.zeros(B * H, L, L, dtype=q.dtype)
        s = torch.baddbmm(zero, q, k.transpose(1, 2), beta=1.0, alpha=0.3).view(B, H, L, L)
        p = softmax_fp32(added_causal(self, s))
        return (p @ v).transpose(1, 2).flatten(2)


@wild("query / 2 key-value heads of 8, interleaved RoPE, causal", H=6)
class XTransformers(Attention):
    """Tiled heads, einsum, a scale of the rotation that is 1, softmax in fp32, where(bool)."""

    def attend(self, q, k, v):
        k, v = (x.repeat(1, self.H // self.K, 1, 1) for x in (k, v))
        s = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        i, j = s.shape[-2:]
        hidden = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
        p = F.softmax(s.masked_fill(hidden, MIN), dim=-1, dtype=torch.float32).type(s.dtype)
        return torch.einsum("bhij,bhjd->bhid", p, v).transpose(1, 2).flatten(2)

    def __init__(self, **options):
        super().__init__(rotation=self.turned, **options)

    @staticmethod
    def turned(x, cos, sin):
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cos * 1.0 + torch.stack((-x2, x1), -1).flatten(-2) * sin * 1.0


@wild("interleaved RoPE on 4 lanes, no mask", D=12)
class LeftMiddleRight(Attention):
    """rotary-embedding-torch: lanes pass on both sides of the ones that turn."""

    def rotated(self, x, length):
        left, middle, right = x[..., :4], x[..., 4:8], x[..., 8:]
        cos, sin = self.cos[:length, :4], self.sin[:length, :4]
        return torch.cat((left, interleaved(middle, cos, sin), right), -1)


@wild("interleaved RoPE, no mask")
class Torchtune(Attention):
    """Pairs against a cache [S, D/2, 2] in the layout before the transpose."""

    def rotated(self, x, length):
        cache = torch.stack((self.cos[:, :4], self.sin[:, :4]), -1)[:length].view(
            1, length, 1, 4, 2
        )
        pairs = x.transpose(1, 2).float().reshape(x.shape[0], length, x.shape[1], 4, 2)
        turned = torch.stack(
            [
                pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
                pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x).transpose(1, 2)


@wild("rotate-half RoPE, causal, softcap 5")
class LitGpt(Attention):
    """An empty rest is joined to the lanes that turn; the mask is triu of ones, filled."""

    def __init__(self, **options):
        super().__init__(
            scores=lambda s: torch.tanh(s * 0.3 / 5.0) * 5.0, mask=self.hidden, **options
        )

    @staticmethod
    def hidden(_, s):
        hidden = torch.ones(s.shape[-1], s.shape[-1]).triu(1)
        return s + hidden.masked_fill(hidden.bool(), MIN)

    def rotated(self, x, length):
        turned = super().rotated(x[..., : self.D], length)
        return torch.cat((turned, x[..., self.D :]), -1)


@wild("6 query / 2 key-value heads of 8, rotate-half RoPE, causal", H=6)
class Canary(Attention):
    """Angles by an outer product, cos as [B, 1, S, D], division by sqrt, an fp32 -inf triu."""

    def rotated(self, x, length):
        both = angles(length, self.D).expand(x.shape[0], -1, -1)
        cos, sin = (t.view(x.shape[0], 1, length, self.D) for t in (both.cos(), both.sin()))
        return half(x, cos, sin)

    def attend(self, q, k, v):
        k, v = (repeat_kv(x, self.H // self.K) for x in (k, v))
        s = torch.matmul(q, k.transpose(2, 3)) / self.D**0.5
        s = s + torch.full(s.shape[-2:], float("-inf")).triu(1)
        return torch.matmul(softmax_fp32(s), v).transpose(1, 2).contiguous().flatten(2)


@wild("14 query / 2 key-value heads of 8, rotate-half RoPE, no mask", H=14)
class SevenToOne(Attention):
    pass


def made(name):
    cls, summary, options = WILD[name]
    return cls(**options), summary


@pytest.mark.parametrize("name", WILD)
def test_fuses_wild_spelling_in_training(name):
    module, summary = made(name)
    assert summary in fuses(module, *inputs(), scores=(11, 11)).summary


@pytest.mark.parametrize("name", WILD)
def test_fuses_wild_spelling_in_inference(name):
    module, summary = made(name)
    seen = fuses(module, *inputs(L=13), train=False, scores=(13, 13))
    assert summary in seen.summary


@pytest.mark.parametrize("name", ["Llama", "Cohere", "NormedBefore", "NormedAfter", "GptOss"])
def test_fuses_wild_spelling_in_bf16(name):
    cls, summary, options = WILD[name]
    module = cls(dtype=torch.bfloat16, **options)
    assert summary in fuses(module, *inputs(dtype=torch.bfloat16)).summary


def test_cross_attention_without_rotation_beside_one_with_it():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.cross = Causal(E=24, H=4, K=2, D=6), Attention(rotation=None)

        def forward(self, x, context):
            return self.cross(x + self.own(x), context)

    fuses(Both(), *inputs(L=11, S=17), sites=2)


def test_fuses_backward_by_hand_with_softcap_and_groups():
    """The forward is computed once more, the derivative of the softcap is 1 - tanh^2."""

    def core(q, k, v, grad):
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        bent = torch.tanh(q @ k.mT * 0.4 / 5.0)
        p = torch.softmax(bent * 5.0, -1)
        dp = grad @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * (1 - bent * bent) * 0.4
        dk, dv = ((x.mT @ y).unflatten(1, (2, 2)).sum(2) for x, y in ((ds, q), (p, grad)))
        return p @ v, ds @ k, dk, dv

    q, k, v, grad = (torch.randn(2, h, 11, 8) for h in (4, 2, 2, 4))
    seen = fuses(core, q, k, v, grad, train=False, backwards=1, scores=(11, 11))
    assert "4 query / 2 key-value heads of 8, no RoPE inside, no mask, softcap 5" in seen.summary
