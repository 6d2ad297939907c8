"""The warp-specialised forward without a GPU: when it runs and what it launches."""

import dataclasses
import math

import pytest
import torch
from kernels.bounds import deterministic_algorithms
from kernels.oracle import rotate

from inductor_gqa.kernels import gluon_tiles
from inductor_gqa.kernels.gluon_backward import (
    plan_backward_sm90,
    split_of,
    usable_backward,
)
from inductor_gqa.kernels.gluon_empty_rows import fill_empty_rows_kernel
from inductor_gqa.kernels.gluon_forward import (
    Switches,
    attention_forward_sm90,
    forward_sm90_kernel,
    plan_forward_sm90,
    usable,
)
from inductor_gqa.kernels.plan import LOG2E, Attention, Operand, execute

pytestmark = pytest.mark.skipif(gluon_tiles.WHY_NOT is not None, reason=str(gluon_tiles.WHY_NOT))
B, L, S, K, R, D = 2, 300, 300, 2, 4, 128
LOWEST = torch.finfo(torch.bfloat16).min


def attention(dtype=torch.bfloat16, D=D, E=None, strides=None, tables=(), **numbers):
    """B2-K2-R4-L300-S300 on sm_90; `strides` replaces those of the named operands."""
    operands = {
        "q": Operand.contiguous((B, L, K, R, D), dtype),
        "k": Operand.contiguous((B, S, K, D), dtype),
        "v": Operand.contiguous((B, S, K, E or D), dtype),
    }
    for name, value in (strides or {}).items():
        operands[name] = dataclasses.replace(operands[name], strides=value)
    for name in tables:
        operands[name] = Operand.contiguous((B, L, D), torch.float32)
    if numbers.pop("key_mask", False):
        operands["key_mask"] = Operand.contiguous((B, S), torch.bool)
    if numbers.pop("bias", False):
        operands["bias"] = Operand.contiguous((B, K, R, L, S), dtype)
    return Attention(operands, **({"scale": 0.1, "capability": (9, 0)} | numbers))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_causal_attention_of_common_widths(D, dtype):
    assert usable(attention(dtype, D, band_hi=0)) is None


def test_runs_slices_of_a_merged_projection():
    width = (K * R + 2 * K) * D
    strides = {"q": (L * width, width, R * D, D, 1), "k": (S * width, width, D, 1)}
    assert usable(attention(strides=strides, band_hi=0, band_lo=-99, key_mask=True)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (8, 0)}, "capability is (8, 0)"),
        ({"capability": None}, "capability is None"),
        ({"dtype": torch.float32}, "dtypes are ['torch.float32']"),
        ({"D": 96}, "head dim is 96"),
        ({"E": 64}, "head dim is 128 with values of 64"),
        ({"softcap": 30.0}, "scale is 0.1"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"bias": True}, "bias"),
        ({"band_hi": 0, "fill": -1e4}, "fill"),
        ({"band_lo": -(2**31)}, "largest length or band is 2147483648"),
        ({"D": 256, "key_mask": True}, "band_lo or key_mask is given"),
        ({"strides": {"k": (0, K * D, D, 1)}}, "k: strides are (0, 256, 128, 1)"),
        ({"strides": {"v": (S * K * D, K * D, D, 2)}}, "v: last stride is 2"),
        ({"strides": {"q": (L * 1028, 1028, 512, 128, 1)}}, "q: strides are"),
    ],
)
def test_says_why_it_does_not_run(changes, reason):
    assert reason in usable(attention(**changes))


def test_names_an_unaligned_operand():
    subject = attention()
    odd = dataclasses.replace(subject.tensors["k"], is_aligned=False)
    subject = dataclasses.replace(subject, tensors={**subject.tensors, "k": odd})
    assert usable(subject) == "k: first byte is not on a multiple of 16"


def test_launcher_raises_the_reason_on_a_cpu():
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="capability is None"):
        attention_forward_sm90(x[:, :, None], x, x, scale=1.0)


def test_a_dimension_of_one_may_have_any_stride():
    strides = {"q": (L * K * R * D, K * R * D, R * D, D, 1)}
    subject = attention(strides=strides)
    single = Operand((1, S, K, D), (3, K * D, D, 1), torch.bfloat16)
    query = Operand((1, L, K, R, D), (0, K * R * D, R * D, D, 1), torch.bfloat16)
    tensors = {"q": query, "k": single, "v": single}
    assert usable(dataclasses.replace(subject, tensors=tensors)) is None


def test_q_is_rotated_by_the_groups_and_k_by_a_launch():
    tables = ("cos_q", "sin_q", "cos_k", "sin_k")
    plan = plan_forward_sm90(attention(tables=tables))
    assert [x.kernel.fn.__name__ for x in plan.launches] == ["rotate_kernel", "forward_sm90_kernel"]
    assert plan.launches[0].scalars["W_Q"] == 0
    assert plan.launches[1].scalars["ROPE"]
    assert plan.launches[1].descriptors["k_desc"].slot == "k_rotated"
    assert "q_rotated" not in plan.allocate


@pytest.mark.parametrize("changes", [{"rope_interleaved": True}, {"D": 256}])
def test_q_is_rotated_by_a_launch_where_the_groups_cannot(changes):
    plan = plan_forward_sm90(attention(tables=("cos_q", "sin_q"), **changes))
    assert plan.launches[0].scalars["W_Q"] > 0
    assert not plan.launches[1].scalars["ROPE"]
    assert plan.launches[1].descriptors["q_desc"].slot == "q_rotated"


def long_rows(L, D=64, batch=8, **numbers):
    """Eight heads of which every row sees all or half of L keys."""
    names = ("cos_q", "sin_q") if numbers.pop("rope", False) else ()
    q = Operand.contiguous((batch, L, K, R, D), torch.bfloat16)
    k = Operand.contiguous((batch, L, K, D), torch.bfloat16)
    tensors = {"q": q, "k": k, "v": k}
    tensors |= dict.fromkeys(names, Operand.contiguous((batch, L, D), torch.float32))
    if numbers.pop("key_mask", False):
        tensors["key_mask"] = Operand.contiguous((batch, L), torch.bool)
    return plan_forward_sm90(Attention(tensors, scale=0.1, capability=(9, 0), **numbers))


@pytest.mark.parametrize(
    ("numbers", "groups"),
    [
        ({"L": 1024}, 3),
        ({"L": 1024, "rope": True}, 2),
        ({"L": 2048, "rope": True}, 3),
        ({"L": 512}, 2),
        ({"L": 8192, "band_hi": 0, "rope": True}, 3),
        ({"L": 4096, "band_hi": 0, "rope": True}, 2),
        ({"L": 4096, "batch": 1}, 2),  # two rounds over the device, either way
        ({"L": 8192, "D": 128}, 2),
        ({"L": 8192, "key_mask": True}, 2),
        ({"L": 16384, "band_hi": 0, "band_lo": -8192}, 2),
    ],
)
def test_three_groups_multiply_long_rows_of_narrow_heads(numbers, groups):
    launch = long_rows(**numbers).launches[-1]
    assert launch.scalars["GROUPS"] == groups
    tiles = -(-numbers["L"] // (64 * groups)) * K * R * numbers.get("batch", 8)
    assert launch.scalars["n_tiles"] == tiles


def test_three_groups_have_q_rotated_by_a_launch():
    plan = long_rows(2048, rope=True)
    assert plan.launches[0].scalars["W_Q"] == 64
    assert plan.launches[1].descriptors["q_desc"].slot == "q_rotated"
    assert not plan.launches[1].scalars["ROPE"]


@pytest.mark.parametrize(
    ("numbers", "heads"),
    [
        ({"L": 2048, "band_hi": 0}, 4),
        ({"L": 1024, "band_hi": 0}, 1),
        ({"L": 2048}, 1),
        ({"L": 4096, "band_hi": 0, "band_lo": -1024}, 1),
        ({"L": 1024, "band_hi": 0, "rope": True}, 4),
        ({"L": 2048, "band_hi": 0, "rope": True}, 1),
        ({"L": 512, "rope": True}, 4),
        ({"L": 2048, "band_hi": 0, "D": 64}, 1),
        ({"L": 2048, "band_hi": 0, "D": 256}, 1),
    ],
)
def test_four_heads_share_a_tile_where_that_is_faster(numbers, heads):
    launch = long_rows(**({"D": 128} | numbers)).launches[-1]
    assert launch.scalars["HEADS"] == heads
    assert launch.descriptors["q_desc"].block[1:4] == (64 // heads, 1, heads)


def test_rows_are_filled_only_where_some_may_be_empty():
    def kernels(**numbers):
        return [x.kernel for x in plan_forward_sm90(attention(**numbers)).launches]

    both = [forward_sm90_kernel, fill_empty_rows_kernel]
    assert kernels(band_hi=0, fill=LOWEST) == both[:1]
    assert kernels(band_hi=0, key_mask=True) == both[:1]
    assert kernels(band_hi=0, key_mask=True, fill=LOWEST) == both
    assert kernels(band_hi=-1, fill=LOWEST) == both


def test_persistent_grid_is_as_wide_as_the_device():
    long = attention()
    assert plan_forward_sm90(long, multiprocessors=7).launches[0].grid == (7,)
    apart = plan_forward_sm90(long, multiprocessors=7, switches=Switches(is_persistent=False))
    assert apart.launches[0].grid == (-(-L // 128) * B * K * R,)


def test_empty_rows_become_the_mean_of_v(device):
    """L1000 crosses the rows of a program; in one head most rows are empty, in another none."""
    L, S = 1000, 130
    v = torch.randn(B, S, K, 64, device=device)
    out = torch.full((B, L, K, R, 64), math.nan, device=device)
    lse = torch.full((B, K, R, L), -math.inf, device=device)
    has_keys = torch.rand(B, K, R, L, device=device) < 0.3
    has_keys[1, 1] = True
    lse[has_keys] = 1.0
    out[has_keys.permute(0, 3, 1, 2)] = 2.0
    operands = {"q": Operand.contiguous((B, L, K, R, 64), v.dtype), "v": Operand.of(v)}
    subject = Attention(
        {**operands, "k": operands["v"]}, scale=1.0, band_hi=-1, fill=LOWEST, capability=(9, 0)
    )
    plan = plan_forward_sm90(subject)
    plan = dataclasses.replace(plan, allocate={}, launches=plan.launches[1:])
    execute(plan, {"q": out, "v": v, "out": out, "lse": lse})
    mean = v.double().mean(1)[:, None, :, None].float().expand_as(out)
    empty = ~has_keys.permute(0, 3, 1, 2)
    assert torch.equal(lse, torch.where(has_keys, 1.0, math.inf))
    torch.testing.assert_close(out[empty], mean[empty])
    assert bool((out[~empty] == 2.0).all())


def test_log_sum_exp_and_delta_are_padded_so_that_nothing_counts_there(device):
    L, E = 150, 64
    out, grad_out = (torch.randn(B, L, K, R, E, device=device) for _ in range(2))
    lse = torch.randn(B, K, R, L, device=device)
    named = {"out": out, "grad_out": grad_out, "lse": lse, "q": out}
    operands = {name: Operand.of(x) for name, x in named.items()}
    keys = Operand.contiguous((B, L, K, E), out.dtype)
    subject = Attention({**operands, "k": keys, "v": keys}, scale=0.25, capability=(9, 0))
    plan = plan_backward_sm90(subject)
    plan = dataclasses.replace(plan, launches=plan.launches[:1], results=("rows",))
    (rows,) = execute(plan, named)
    lse_padded, delta_padded = rows.unbind(1)
    delta = (out.double() * grad_out.double()).sum(-1).permute(0, 2, 3, 1).float()
    assert rows.shape == (B * K * R, 2, 64 + 192 + 64)
    in_scores = lse.flatten(0, 2) / (0.25 * LOG2E)
    torch.testing.assert_close(lse_padded[:, 64 : 64 + L], in_scores)
    torch.testing.assert_close(delta_padded[:, 64 : 64 + L], delta.flatten(0, 2))
    for x, outside in ((lse_padded, math.inf), (delta_padded, 0.0)):
        assert bool((x[:, :64] == outside).all())
        assert bool((x[:, 64 + L :] == outside).all())


def backward_of(subject):
    tensors = {**subject.tensors, "grad_out": subject.tensors["q"], "out": subject.tensors["q"]}
    tensors["lse"] = Operand.contiguous((B, K, R, L), torch.float32)
    return dataclasses.replace(subject, tensors=tensors)


TABLES = ("cos_q", "sin_q", "cos_k", "sin_k")
ALWAYS = ["pad_kernel", "keys_sm90_kernel", "queries_sm90_kernel"]
SWEEP = ["pad_kernel", "sweep_sm90_kernel", "finish_kernel"]


@pytest.mark.parametrize(
    ("changes", "split", "before", "after"),
    [
        ({}, 1, [], []),
        ({}, 4, [], ["gather_kernel"]),
        ({"tables": TABLES}, 1, ["rotate_kernel"], ["rotate_kernel"]),
        ({"tables": TABLES}, 2, ["rotate_kernel"], ["gather_kernel"]),
        ({"tables": TABLES[:2]}, 1, ["rotate_kernel"], []),
        ({"tables": TABLES[2:]}, 1, ["rotate_kernel"], ["rotate_kernel"]),
        ({"tables": TABLES, "rope_interleaved": True}, 1, ["rotate_kernel"], ["rotate_kernel"]),
        (
            {"tables": TABLES, "rope_interleaved": True},
            4,
            ["rotate_kernel"],
            ["gather_kernel", "rotate_kernel"],
        ),
    ],
)
def test_gradients_are_turned_back_by_the_fewest_launches(changes, split, before, after):
    subject = backward_of(attention(band_hi=0, **changes))
    assert usable_backward(subject) is None
    plan = plan_backward_sm90(subject, split=split)
    assert [x.kernel.fn.__name__ for x in plan.launches] == [*before, *ALWAYS, *after]
    written = {slot for x in plan.launches for slot in x.tensors.values()}
    written |= {box.slot for x in plan.launches for box in x.descriptors.values()}
    assert set(plan.allocate) <= written


@pytest.mark.parametrize(
    ("changes", "split", "before", "after"),
    [
        ({}, 1, [], []),
        ({"tables": TABLES}, 1, ["rotate_kernel"], ["rotate_kernel"]),
        ({"tables": TABLES[:2]}, 1, ["rotate_kernel"], []),
        ({"tables": TABLES}, 4, ["rotate_kernel"], ["gather_kernel"]),
    ],
)
def test_one_sweep_turns_queries_back_where_their_sums_are_rounded(changes, split, before, after):
    subject = backward_of(attention(D=64, band_hi=0, **changes))
    plan = plan_backward_sm90(subject, split=split, sweeps=True)
    assert [x.kernel.fn.__name__ for x in plan.launches] == [*before, *SWEEP, *after]
    assert plan.allocate["sums"].dtype == torch.float32
    written = {slot for x in plan.launches for slot in x.tensors.values()}
    written |= {box.slot for x in plan.launches for box in x.descriptors.values()}
    assert set(plan.allocate) <= written


def as_summed(x_BLKRD):
    """As the registers of a 64 x 64 product hold it: row and lane of a warp's thread are warp,
    eight rows, row and eight lanes, pair, lane, of which a thread has two by two."""
    D, L = x_BLKRD.shape[-1], x_BLKRD.shape[1]
    queries = 128 * 64 // D
    x = torch.nn.functional.pad(x_BLKRD.flatten(2, 3).transpose(1, 2), (0, 0, 0, -L % queries))
    x = x.unflatten(-2, (-1, 4, 2, 8)).unflatten(-1, (-1, 8, 4, 2))
    return x.permute(0, 1, 2, 6, 7, 3, 5, 8, 4, 9).reshape(-1, 256).contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("L", [1, 37, 64, 150])
@pytest.mark.parametrize("D", [64, 128])
def test_sums_of_queries_start_at_zero_and_are_scaled_and_turned_back(D, L, interleaved, device):
    q, sums = (torch.randn(B, L, K, R, D, device=device) for _ in range(2))
    cos, sin = (torch.randn(B, L, D, device=device) for _ in range(2))
    lse = torch.zeros(B, K, R, L, device=device)
    named = {"q": q, "out": q, "grad_out": q, "lse": lse, "cos_q": cos, "sin_q": sin}
    operands = {name: Operand.of(x) for name, x in named.items()}
    keys = Operand.contiguous((B, L, K, D), q.dtype)
    operands |= {"k": keys, "v": keys}
    numbers = {"scale": 0.25, "rope_interleaved": interleaved, "capability": (9, 0)}
    plan = plan_backward_sm90(Attention(operands, **numbers), sweeps=True)
    by_name = {x.kernel.fn.__name__: x for x in plan.launches}
    pad, finish = (
        dataclasses.replace(plan, launches=(by_name[name],), results=results)
        for name, results in (("pad_kernel", ("sums",)), ("finish_kernel", ("dq",)))
    )
    with deterministic_algorithms():
        assert bool((execute(pad, named)[0] == 0).all())
    left = {name: x for name, x in finish.allocate.items() if name != "sums"}
    (dq,) = execute(dataclasses.replace(finish, allocate=left), named | {"sums": as_summed(sums)})
    x = q.double().requires_grad_()
    turned = rotate(x, cos.double(), sin.double(), 0, interleaved)
    (expected,) = torch.autograd.grad(turned, x, 0.25 * sums.double())
    torch.testing.assert_close(dq.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("S", "band", "pair", "edge"),
    [
        (8192, {"band_hi": 0}, 2, False),
        (8192 - 128, {"band_hi": 0}, 2, True),  # the last pair is half empty
        (8192, {"band_lo": 0}, 2, False),
        (8192, {"band_lo": -9, "band_hi": 0}, 1, False),
        (8192 - 128, {}, 1, False),
        (1024, {"band_hi": 0}, 1, False),  # fewer tiles than programs
    ],
)
def test_tiles_of_unequal_work_are_paired_where_a_program_has_several(S, band, pair, edge):
    keys = Operand.contiguous((B, S, K, 64), torch.bfloat16)
    query = Operand.contiguous((B, S, K, R, 64), torch.bfloat16)
    operands = {"q": query, "out": query, "grad_out": query, "k": keys, "v": keys}
    operands["lse"] = Operand.contiguous((B, K, R, S), torch.float32)
    subject = Attention(operands, scale=0.1, capability=(9, 0), **band)
    plan = plan_backward_sm90(subject, split=1, sweeps=True)
    (sweep,) = (x for x in plan.launches if x.kernel.fn.__name__ == "sweep_sm90_kernel")
    assert (sweep.scalars["PAIR"], sweep.scalars["EDGE"]) == (pair, edge)


@pytest.mark.parametrize(
    ("batch", "length", "best"),
    [
        (1, 128, 4),
        (1, 512, 4),
        (1, 691, 4),
        (1, 1024, 4),
        (1, 2048, 2),
        (2, 128, 4),
        (4, 512, 2),
        (2, 1024, 2),
        (8, 384, 1),
        (4, 1024, 1),
        (1, 16384, 1),
    ],
)
def test_groups_are_shared_as_was_measured_to_be_best(batch, length, best):
    """32/8 heads, D = 128, causal, one H200."""
    query = Operand.contiguous((batch, length, 8, 4, 128), torch.bfloat16)
    keys = Operand.contiguous((batch, length, 8, 128), torch.bfloat16)
    subject = Attention({"q": query, "k": keys, "v": keys}, scale=1.0, band_hi=0)
    assert split_of(subject, multiprocessors=132) == best


def test_a_window_is_as_long_as_it_is_wide():
    keys = Operand.contiguous((1, 2**20, 1, 64), torch.bfloat16)
    query = Operand.contiguous((1, 2**20, 1, 8, 64), torch.bfloat16)
    operands = {"q": query, "k": keys, "v": keys}
    window = Attention(operands, scale=1.0, band_lo=-100, band_hi=0)
    assert split_of(window, multiprocessors=132) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_mask": True}, "key_mask is given"),
        ({"band_hi": -1, "fill": LOWEST}, "rows may see no key"),
        ({"D": 256}, "head dim is 256, accepted 64 or 128"),
        ({"softcap": 1.0}, "scale is 0.1"),
        ({"scale": 1e-30}, "scale is 1e-30, accepted 1e-20 or more"),
    ],
)
def test_says_why_the_backward_does_not_run(changes, reason):
    assert reason in usable_backward(backward_of(attention(**changes)))
