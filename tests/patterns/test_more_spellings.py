"""Spellings that models and packages use beside those of `test_wild.py`: tables that are chosen,
gathered or cut while they are made, norms head by head, lengths of q and k that differ."""

import pytest
import torch
from fused import fuses, never_wrong
from spellings import Attention, half, inputs, partial, softmax_fp32


def angles_at(positions, D=8):
    freqs = positions.float()[..., None] / 10.0 ** (torch.arange(0, D, 2) / D)
    return torch.cat((freqs, freqs), -1)


def chosen_by_length(self, x, length):
    """Phi 3: the long factors where the longest position says so."""
    positions = torch.arange(length) + 1
    is_long = positions.max() + 1 > 8
    factor = torch.where(is_long, torch.tensor(0.5), torch.tensor(2.0))
    at = angles_at(positions) * factor
    return at.cos(), at.sin()


def after_the_padding(self, x, length):
    """TimesFM: positions count from the first entry that is no padding."""
    first = (torch.arange(length) < 2).sum()
    at = angles_at(torch.arange(length) - first)
    return at.cos(), at.sin()


def sorted_and_gathered(self, x, length):
    """V-JEPA: positions of the tokens that are kept, in order."""
    ids = torch.arange(length).flip(0).sort().values
    at = angles_at(torch.gather(torch.arange(length) * 2, 0, ids))
    return at.cos(), at.sin()


def last_rows(self, x, length):
    """A table for all positions, of which the last ones are q's."""
    at = angles_at(torch.arange(20))[-length:]
    return at.cos(), at.sin()


def scaled_frequencies(self, x, length):
    """YaRN in the graph: frequencies mixed by a ramp, and a factor on both tables."""
    ramp = torch.clamp((torch.arange(4) - 1) / 2, 0, 1)
    freqs = 10.0 ** (-torch.arange(4) / 4) * (1 - ramp) + 0.1 * ramp
    at = torch.outer(torch.arange(length).float(), freqs)
    at = torch.cat((at, at), -1)
    return at.cos() * 1.1, at.sin() * 1.1


TABLES = [chosen_by_length, after_the_padding, sorted_and_gathered, last_rows, scaled_frequencies]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("tables", TABLES, ids=lambda f: f.__name__)
def test_fuses_with_the_rotation_whatever_made_the_table(tables, train):
    seen = fuses(Attention(tables=tables), *inputs(), train=train, scores=(11, 11))
    assert "rotate-half RoPE" in seen.summary


class NormedHeadByHead(Attention):
    """StableLM: each head has a norm of its own, and the heads are joined again."""

    def attend(self, q, k, v):
        made = []
        for x, n in ((q, self.H), (k, self.K)):
            parts = [
                torch.nn.functional.layer_norm(h, (self.D,)) * (1 + k / 4)
                for k, h in enumerate(x.split(1, 1))
            ]
            assert len(parts) == n
            made.append(partial(torch.cat(parts, 1), self.cos[:11], self.sin[:11]))
        return super().attend(*made, v)


class NormedToUnitLength(Attention):
    """x-transformers: q and k over their clamped norms, then turned."""

    def rotated(self, x, length):
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return super().rotated(x, length)


class UnequalLengths(Attention):
    """The queries are the last of the keys' positions."""

    def attend(self, q, k, v):
        return super().attend(q[:, :, -5:], k, v)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "module",
    [lambda: NormedHeadByHead(rotation=None), NormedToUnitLength],
    ids=["head by head", "unit length"],
)
def test_fuses_with_its_rotation(module, train):
    seen = fuses(module(), *inputs(), train=train)
    assert "no RoPE" not in seen.summary


def test_queries_that_are_cut_after_they_turned():
    """In training their gradient is put between zeros before it turns back, so that the rotation
    stays outside."""
    assert "rotate-half RoPE" in fuses(UnequalLengths(), *inputs(), train=False).summary
    never_wrong(UnequalLengths(), *inputs(), left=None, notes="stays outside the kernel")


def talking(self, q, k, v, before):
    s = self.grouping.scores(q, k) * self.scale
    mix = torch.arange(16.0).view(4, 4) / 16
    p = softmax_fp32(torch.einsum("bhij,hg->bgij", s, mix)) if before else softmax_fp32(s)
    p = p if before else torch.einsum("bhij,hg->bgij", p, mix)
    return self.grouping.out(p, v)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("before", [False, True], ids=["weights", "scores"])
def test_talking_heads_are_left_or_right(before, train):
    """Heads are mixed by a matmul of their own, before or after the softmax."""

    class Talking(Attention):
        def attend(self, q, k, v):
            return talking(self, q, k, v, before)

    never_wrong(Talking(), *inputs(), train=train)


LOSSES = {
    "entropy": lambda p: -(p * (p + 1e-6).log()).sum(-1),
    "mean over heads": lambda p: p.mean(1),
    "a row": lambda p: p[:, :, -1],
    "as they are": lambda p: p,
    "squares": lambda p: p.square().sum(),
}


@pytest.mark.parametrize("rotation", [half, None], ids=["half", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_the_weights_is_left_with_its_reason(name, rotation):
    """The gradient of the weights then has two parts."""

    class Returning(Attention):
        def attend(self, q, k, v):
            p = self.softmax(self.grouping.scores(q, k) * self.scale)
            return self.grouping.out(p, v).transpose(1, 2).flatten(2), LOSSES[name](p)

    never_wrong(Returning(rotation=rotation), *inputs(), left="with a gradient, accepted without")
