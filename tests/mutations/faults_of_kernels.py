"""Deliberate faults outside of the readers: in kernels, calls of fused attention, decisions, the
lowering and reports."""

from __future__ import annotations

from faults import FAILURES, Fault

DECODE, FAR = "tests/kernels/test_decode.py", "tests/kernels/test_far_offsets.py"
GARBAGE, CALLS = "tests/kernels/test_hidden_garbage.py", "tests/patterns/test_sdpa.py"
DECISIONS = "tests/test_decide_calls.py"
SCALED_ROPE = "tests/patterns/test_scaled_rope.py"
DECODE_KERNEL = "inductor_gqa/kernels/decode_kernel.py"
DECIDE, SDPA = "inductor_gqa/decide.py", "patterns/sdpa.py"

FAULTS_OF_KERNELS = (
    Fault(
        "the tiles that no split's share holds are lost",
        DECODE_KERNEL,
        "larger = tiles % splits\n",
        "larger = tiles * 0\n",
        DECODE + " -k sees_the_cache",
    ),
    Fault(
        "splits are summed as if their maxima were one",
        DECODE_KERNEL,
        "weight = tl.exp2((tops - origin) * unit)",
        "weight = tl.exp2((tops - tops) * unit)",
        DECODE + " -k dwarf",
    ),
    Fault(
        "keys that a mask hides at the end of a cache are read",
        DECODE_KERNEL,
        "first, hi = seen_keys(key_mask_ptr, stride_key_mask_s, lo, hi, S)",
        "first, _ = seen_keys(key_mask_ptr, stride_key_mask_s, lo, hi, S)",
        DECODE + " -k are_not_read",
    ),
    Fault(
        "the rows of a query are found in 32 bits",
        DECODE_KERNEL,
        "positions.to(tl.int64) * stride_l + r * stride_r",
        "positions * stride_l + r * stride_r",
        FAR + " -k 'decode and q'",
    ),
    Fault(
        "the elements of a mask are found in 32 bits",
        "inductor_gqa/kernels/tiles.py",
        "return i.to(tl.int64) * stride_i + j.to(tl.int64) * stride_j",
        "return i * stride_i + j * stride_j",
        FAR + " -k 'forward and mask'",
    ),
    Fault(
        "rows past the last one see keys that nobody sees",
        "inductor_gqa/kernels/backward_keys.py",
        "n_keys = tl.minimum(S, tl.maximum(L + band_hi, 0))",
        "n_keys = S",
        GARBAGE + " -k 'gradients and causal'",
    ),
    Fault(
        "the fused attention of the CPU is given what hidden keys hold",
        "inductor_gqa/cpu.py",
        "        and (not hides or bool(torch.isfinite(k).all()))\n",
        "",
        GARBAGE + " -k 'cpu and fused'",
    ),
    Fault(
        "one query of a long cache counts as a long call",
        DECIDE,
        "min(lengths) < least",
        "max(lengths) < least",
        DECISIONS,
    ),
    Fault(
        "a call counts as measured without its mask tensor",
        DECIDE,
        "    if not site.sdpa_has_mask:\n",
        "    if False:\n",
        DECISIONS,
    ),
    Fault(
        "the causal diagonal of a rectangle lies where a square's does",
        SDPA,
        "if call.node.target in SQUARE_CAUSAL and not same(*lengths):",
        "if False:",
        CALLS + " -k rectangle_of_unequal",
    ),
    Fault(
        "the scale that a call gives is not looked at",
        SDPA,
        "scale = 1.0 / math.sqrt(D) if number is None else number",
        "scale = 1.0 / math.sqrt(D)",
        CALLS + " -k 'no_mask_and_a_scale and plain'",
    ),
    Fault(
        "rows without a key average the values in calls too",
        SDPA,
        "        zeros_empty_rows=may_be_empty(mask, L, S),\n",
        "        zeros_empty_rows=False,\n",
        CALLS + " -k rows_that_see_no_key",
    ),
    Fault(
        "a lowering that fails ends the compile",
        "inductor_gqa/lowering.py",
        "        return opaque(*args)\n",
        "        raise\n",
        FAILURES + " -k lowering",
    ),
    Fault(
        "nobody is told of a rotation with two tables on a lane (xPos)",
        "patterns/outside.py",
        "    return has_lanes and len(wide) > 1 and any(same(n, length) for n in wide)\n",
        "    return False\n",
        SCALED_ROPE,
    ),
    Fault(
        "of two tables on a lane (xPos) the first is taken",
        "patterns/lanes.py",
        "for t, d, at in others) if others else ()",
        "for t, d, at in others) if False else ()",
        SCALED_ROPE + " -k 'scale_inside or of_the_rotated'",
    ),
    Fault(
        "a site that was left is reported as fused",
        "inductor_gqa/report.py",
        '        state = "fused" if self.fused else "left"\n',
        '        state = "fused"\n',
        "tests/test_report.py",
    ),
    Fault(
        "turned rows take the sine of the other half",
        "inductor_gqa/kernels/gluon_tiles.py",
        "    half = stride_w * (D // 2)\n",
        "    half = 0\n",
        "tests/kernels/test_gluon_tiles.py -k turned_where_they_lie",
    ),
    Fault(
        "a key mask is read eight keys late",
        "inductor_gqa/kernels/gluon_tiles.py",
        "(eights.to(gl.int64) * 8) * stride_s",
        "(eights.to(gl.int64) * 8 + 8) * stride_s",
        "tests/kernels/test_gluon_tiles.py -k keeps_exactly",
    ),
    Fault(
        "of a pair of key tiles the second is the first",
        "inductor_gqa/kernels/gluon_sweep_order.py",
        "tile = gl.where(i % 2 == 0, tile, 2 * tiles - 1 - tile)",
        "tile = gl.where(i % 2 == 0, tile, tile)",
        "tests/kernels/test_gluon_sweep.py -k taken_once",
    ),
    Fault(
        "the first queries under a causal mask are skipped",
        "inductor_gqa/kernels/gluon_sweep_order.py",
        "begin = gl.maximum(begin, tile_col - band_hi)",
        "begin = gl.maximum(begin, tile_col + 2 * BM - band_hi)",
        "tests/kernels/test_gluon_sweep.py -k hold_every",
    ),
    Fault(
        "sums of dQ come back with lanes in another order",
        "inductor_gqa/kernels/gluon_ends.py",
        ".permute(3, 1, 0, 2, 4)",
        ".permute(3, 1, 2, 0, 4)",
        "tests/kernels/test_gluon_forward.py -k sums_of_queries",
    ),
    Fault(
        "sums of dQ start at what memory held",
        "inductor_gqa/kernels/gluon_rows.py",
        "if (tile >= 0) & (tile < sums):",
        "if (tile >= 0) & (tile < sums - 1):",
        "tests/kernels/test_gluon_forward.py -k sums_of_queries",
    ),
    Fault(
        "rows of three groups see keys in front of the first one",
        "inductor_gqa/kernels/gluon_forward.py",
        "band_hi < 0 or rows % BN != 0",
        "band_hi < 0",
        "tests/kernels/test_gluon_tiles.py -k visited",
    ),
    Fault(
        "the rotation's adjoint takes a lane's own sine",
        "inductor_gqa/kernels/rotate.py",
        "y1 = x1 * cos1 + x2 * sin2",
        "y1 = x1 * cos1 + x2 * sin1",
        "tests/kernels/test_rotate.py -k adjoint",
    ),
    Fault(
        "heads of a program are turned into each other's place",
        "inductor_gqa/kernels/rotate.py",
        "offsets_of(heads, PITCH)",
        "offsets_of(heads % 2, PITCH)",
        "tests/kernels/test_rotate.py -k forward",
    ),
)
