"""Rotations spelled with complex numbers: neighbours turn, by a table of cosines and sines."""

import pytest
import torch
from fused import BACKWARD, fuses, run
from spellings import Attention, inputs, partial

pytestmark = pytest.mark.usefixtures("without_dynamo")


def paired(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def turned(x, freqs):
    return torch.view_as_real(paired(x) * freqs).flatten(-2).type_as(x)


def by_complex(x, cos, sin):
    h = x.shape[-1] // 2
    return turned(x, torch.complex(cos[..., :h].contiguous().float(), sin[..., :h].float()))


def by_polar(x, cos, sin):
    """Angles and lengths of their own, so that no lane is turned like another."""
    angles = sin[..., ::2].float()
    return turned(x, torch.polar(torch.ones_like(angles) + cos[..., ::2].float() ** 2, angles))


def by_cache_of_pairs(x, cos, sin):
    h = x.shape[-1] // 2
    return turned(x, torch.view_as_complex(torch.stack((cos[..., :h], sin[..., :h]), -1).float()))


def by_table_first(x, cos, sin):
    h = x.shape[-1] // 2
    freqs = torch.complex(cos[..., :h].float(), sin[..., :h].float())
    return torch.view_as_real(freqs * paired(x)).reshape(x.shape).to(x.dtype)


def by_conjugate(x, cos, sin):
    h = x.shape[-1] // 2
    return turned(x, torch.complex(cos[..., :h].float(), sin[..., :h].float()).conj())


def by_scaled_polar(x, cos, sin):
    """Llama 4: the table is multiplied by a number."""
    angles = sin[..., ::2].float()
    return turned(x, torch.polar(torch.ones_like(angles), angles) * 1.25)


def scaled_afterwards(x, cos, sin):
    return by_complex(x, cos, sin) * 0.5


def by_unbind(x, cos, sin):
    """The parts leave one by one."""
    h = x.shape[-1] // 2
    made = paired(x) * torch.complex(cos[..., :h].float(), sin[..., :h].float())
    real, imaginary = torch.view_as_real(made).unbind(-1)
    return torch.stack((real, imaginary), -1).flatten(-2).type_as(x)


def halves_out(x, cos, sin):
    """Pairs in, halves out: both q and k change their order of lanes."""
    h = x.shape[-1] // 2
    made = paired(x) * torch.complex(cos[..., :h].float(), sin[..., :h].float())
    real, imaginary = torch.view_as_real(made).unbind(-1)
    return torch.cat((real, imaginary), -1).type_as(x)


def partly(x, cos, sin):
    w = x.shape[-1] // 2
    return torch.cat((by_complex(x[..., :w], cos[..., :w], sin[..., :w]), x[..., w:]), -1)


SPELLINGS = [
    by_complex,
    by_polar,
    by_cache_of_pairs,
    by_table_first,
    by_conjugate,
    by_scaled_polar,
    scaled_afterwards,
    by_unbind,
    halves_out,
    partly,
]
named = {"ids": lambda f: f.__name__}


def is_inside(seen):
    assert "interleaved RoPE" in seen.summary
    assert seen.count("aten.view_as_complex.default") == 0
    return seen


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("spelling", SPELLINGS, **named)
def test_fuses(spelling, train):
    is_inside(fuses(Attention(rotation=spelling), *inputs(), train=train, scores=(11, 11)))


class Given(Attention):
    """The table is a complex buffer, and q and k turn before their heads come first."""

    def __init__(self, by_batch=False, gathered=False, **options):
        super().__init__(**options)
        angles = torch.randn(2, 64, self.D // 2, generator=torch.Generator().manual_seed(4))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles) * 1.1, angles))
        self.by_batch, self.gathered = by_batch, gathered

    def forward(self, x):
        B, L, _ = x.shape
        freqs = self.freqs[:, :L] if self.by_batch else self.freqs[0, :L]
        if self.gathered:
            freqs = self.freqs[0][torch.arange(L, device=x.device) + 3]
        freqs = freqs.unsqueeze(-2)
        q = (x @ self.wq.t()).view(B, L, self.H, self.D)
        k = (x @ self.wk.t()).view(B, L, self.K, self.D)
        v = (x @ self.wv.t()).view(B, L, self.K, self.V)
        q, k = turned(q, freqs), turned(k, freqs)
        return self.attend(*(t.transpose(1, 2) for t in (q, k, v)))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("options", [{}, {"by_batch": True}, {"gathered": True}], ids=str)
def test_fuses_with_a_complex_buffer(options, train):
    is_inside(fuses(Given(**options), *inputs(), train=train, scores=(11, 11)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [Given, Attention])
def test_dtypes(module, dtype):
    options = {"rotation": by_complex} if module is Attention else {}
    is_inside(fuses(module(D=16, dtype=dtype, **options), *inputs(L=33, dtype=dtype)))


@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 1), (1, 1), (6, 3)])
@pytest.mark.parametrize("L", [2, 63])
def test_heads_and_odd_lengths(H, K, L):
    is_inside(fuses(Given(H=H, K=K), *inputs(L=L)))


def test_one_batch_entry():
    is_inside(fuses(Given(), *inputs(B=1)))
    is_inside(fuses(Given(H=1, K=1), *inputs(B=1)))


@pytest.mark.parametrize("spelling", [by_complex, by_polar], **named)
def test_dynamic_lengths(spelling):
    more = [inputs(B=3, L=17, seed=2)]
    module = Attention(rotation=spelling)
    is_inside(fuses(module, *inputs(B=2, L=13), dynamic=True, more=more))


def test_frozen_k():
    module = Given()
    module.wk.requires_grad_(False)
    seen = is_inside(fuses(module, *inputs(grad=False)))
    assert seen.node_of(BACKWARD).args[3:6] == (True, False, True)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_real_code_is_generated_and_right():
    assert is_inside(run(Given(), *inputs(), codegen=True)).fused == 1


class TestNearMisses:
    """The rotation stays outside with its reason, and the attention fuses."""

    @staticmethod
    def outside(rotation, reason, **options):
        seen = fuses(Attention(rotation=rotation, **options), *inputs())
        assert "no RoPE inside" in seen.summary
        (note,) = seen.sites[0].notes
        assert "rotation stays outside the kernel: " in note
        assert reason in note, note

    def test_two_tables(self):
        def twice(x, cos, sin):
            freqs = torch.complex(cos[..., :4], sin[..., :4])
            return torch.view_as_real(paired(x) * freqs * freqs).flatten(-2)

        self.outside(twice, "lane 0 has 3 terms")

    def test_sum_with_a_table(self):
        def shifted(x, cos, sin):
            freqs = torch.complex(cos[..., :4], sin[..., :4])
            return torch.view_as_real(paired(x) * freqs + freqs).flatten(-2)

        self.outside(shifted, "the lanes come from 2 tensors (aten.view.dtype), accepted one")

    def test_conjugated_input(self):
        def mirrored(x, cos, sin):
            freqs = torch.complex(cos[..., :4], sin[..., :4])
            return torch.view_as_real(paired(x).conj() * freqs).flatten(-2)

        self.outside(mirrored, "is used by aten._conj")

    def test_table_by_head(self):
        def by_head(x, cos, sin):
            heads = torch.arange(1.0, x.shape[1] + 1)[:, None, None]
            freqs = torch.complex(cos[..., :4] * heads, sin[..., :4] * heads)
            return torch.view_as_real(paired(x) * freqs).flatten(-2)

        self.outside(by_head, "varies by head")

    def test_part_swapped(self):
        def swapped(x, cos, sin):
            made = paired(x) * torch.complex(cos[..., :4], sin[..., :4])
            return torch.view_as_real(made).flip(-1).flatten(-2)

        self.outside(swapped, "the head dim lies in 2 dims of a tensor, accepted 1")

    def test_real_parts_alone(self):
        def real(x, cos, sin):
            made = paired(x) * torch.complex(cos[..., :4], sin[..., :4])
            return torch.cat([torch.view_as_real(made)[..., 0]] * 2, -1)

        self.outside(real, "accepted 8")


def test_reason_names_a_rotation_of_half_the_lanes():
    """A real rotation of other lanes than the kernels turn is named as well."""

    def quarters(x, cos, sin):
        a, b, c, d = x.chunk(4, -1)
        return x * cos + torch.cat((-b, a, -d, c), -1) * sin

    seen = fuses(Attention(rotation=quarters, D=16), *inputs())
    assert seen.sites[0].notes == (
        "rotation stays outside the kernel: lane 0 with 4 of 16 turns, accepted halves or "
        "neighbours",
    )


def test_no_note_without_a_rotation():
    assert fuses(Attention(rotation=None), *inputs()).sites[0].notes == ()
    assert fuses(Attention(rotation=partial), *inputs()).sites[0].notes == ()
