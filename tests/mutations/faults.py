"""Deliberate faults: one substitution in a source each, and the test that must catch it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    path: str  # in the repository
    old: str  # occurs once
    new: str
    test: str  # a test file, or tests of it, and options of pytest


API, VERIFY = "tests/test_api.py", "tests/compositions/test_verify.py"
MASKS, ROPE = "tests/patterns/test_masks.py", "tests/patterns/test_rope.py"
SCORES, BACKWARD = "tests/patterns/test_scores.py", "tests/patterns/test_backward.py"
GROUPING = "tests/patterns/test_grouping.py"
PARTIAL = "tests/compositions/test_partial_training.py"
SHAPES = "tests/compositions/test_shapes.py"
CHECKPOINTS = "tests/compositions/test_checkpointing.py"
EXPORT = "tests/compositions/test_export.py -k assert"
FAILURES = "tests/compositions/test_failures.py"

REFERENCE, REWRITE = "inductor_gqa/reference.py", "inductor_gqa/rewrite.py"
PASSES, TABLES = "inductor_gqa/passes.py", "inductor_gqa/tables.py"

FAULTS = (
    Fault(
        "rotation turns halves the other way",
        REFERENCE,
        "crossed = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)",
        "crossed = torch.cat((turned[..., width // 2 :], -turned[..., : width // 2]), -1)",
        ROPE + " -k rotation_in_inference",
    ),
    Fault(
        "rotation turns neighbours the other way",
        REFERENCE,
        "crossed = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)",
        "crossed = torch.stack((turned[..., 1::2], -turned[..., ::2]), -1).flatten(-2)",
        ROPE + " -k 'rotation_in_inference and interleaved'",
    ),
    Fault(
        "the adjoint of the rotation is the rotation",
        REFERENCE,
        "crossed = torch.cat((swept[..., width // 2 :], -swept[..., : width // 2]), -1)",
        "crossed = torch.cat((-swept[..., width // 2 :], swept[..., : width // 2]), -1)",
        ROPE + " -k rotation_in_training",
    ),
    Fault(
        "the sine keeps its sign",
        TABLES,
        "return node if sign > 0 else emit.call(aten.neg.default, node)",
        "return node",
        ROPE + " -k 'rotation_in_inference and inverse'",
    ),
    Fault(
        "the second half takes the columns backwards",
        TABLES,
        "return emit.call(aten.cat.default, [node, node], -1)",
        "return emit.call(aten.cat.default, [node, emit.call(aten.flip.default, node, [-1])], -1)",
        ROPE + " -k half_table",
    ),
    Fault(
        "rotated lanes start at 0",
        REWRITE,
        "turn.start if turn else 0,",
        "0,",
        ROPE + " -k partial_at_end",
    ),
    Fault(
        "lanes turn as halves, always",
        REWRITE,
        "turn.interleaved if turn else False,",
        "False,",
        ROPE + " -k 'rotation_in_inference and interleaved'",
    ),
    Fault(
        "two lanes may turn in one direction",
        "patterns/rotation.py",
        "if len(signs) != 1:",
        "if len(signs) > 2:",
        ROPE + " -k one_direction",
    ),
    Fault(
        "the upper end of the band is one too high",
        "patterns/masks.py",
        'return "high", rest',
        'return "high", rest + 1',
        MASKS + " -k test_fuses_causal_mask",
    ),
    Fault(
        "the lower end of the band has the other sign",
        "patterns/masks.py",
        'return "low", -rest',
        'return "low", rest',
        MASKS + " -k sliding_window",
    ),
    Fault(
        "the wider of two bands wins",
        "patterns/masks.py",
        "_tighter(high, bound, min)",
        "_tighter(high, bound, max)",
        MASKS + " -k tighter",
    ),
    Fault(
        "a part of an axis is the axis",
        "patterns/masks.py",
        "if not same(digit.stride, 1) or not same(digit.size, length):",
        "if not same(digit.stride, 1):",
        MASKS + " -k grid",
    ),
    Fault(
        "a negated mask is not negated",
        REWRITE,
        "        if not positive:\n            node = emit.call(aten.bitwise_not.default, node)\n",
        "",
        MASKS + " -k 'padding or boolean'",
    ),
    Fault(
        "the second bias is dropped",
        REWRITE,
        "total = emit.call(aten.add.Tensor, *wide)",
        "total = wide[0]",
        MASKS + " -k 'two_biases'",
    ),
    Fault(
        "a fill of any value drops the key",
        REWRITE,
        "None if mask.fill == -math.inf else mask.fill",
        "None",
        MASKS + " -k 'mild or without_a_visible'",
    ),
    Fault(
        "padding is read as visible",
        REFERENCE,
        "masked = ~key_mask[:, None, None, None, :]",
        "masked = key_mask[:, None, None, None, :]",
        MASKS + " -k fuses_padding",
    ),
    Fault(
        "a factor of the scores is dropped",
        "patterns/scores.py",
        "                out.scale *= stage.factor\n",
        "                out.scale *= 1.0\n",
        SCORES + " -k fuses_scale",
    ),
    Fault(
        "division multiplies",
        "patterns/scores.py",
        "1.0 / number if divides else number",
        "number",
        SCORES + " -k fuses_scale",
    ),
    Fault(
        "the tensor of a scale is dropped",
        REWRITE,
        "        site.scale_tensor,\n",
        "        None,\n",
        SCORES + " -k scale_that_is_a_tensor",
    ),
    Fault(
        "the softcap has no slope",
        REFERENCE,
        'ds = ds * a["scale"] if slope is None else ds * slope * a["scale"]',
        'ds = ds * a["scale"]',
        SCORES + " -k softcap",
    ),
    Fault(
        "the row sum of the softmax's gradient is missing",
        REFERENCE,
        "ds = p * (dp - (p * dp).sum(-1, keepdim=True))\n    if hidden",
        "ds = p * dp\n    if hidden",
        PARTIAL + " -k wanted",
    ),
    Fault(
        "the gradient of a sink has the other sign",
        REWRITE,
        "return emit.call(aten.neg.default, total)",
        "return total",
        SCORES + " -k sink",
    ),
    Fault(
        "the given weights are not summed over their row",
        REFERENCE,
        "ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))",
        "ds = scale * p * dp",
        BACKWARD + " -k by_hand",
    ),
    Fault(
        "heads are grouped in the other order",
        REWRITE,
        "return self.batch, self.i, self.heads, self.group, self.d",
        "return self.batch, self.i, self.group, self.heads, self.d",
        GROUPING + " -k grouping_in_inference",
    ),
    Fault(
        "the lengths may be swapped in the scores",
        REWRITE,
        "return self.batch, self.heads, self.group, self.i, self.j",
        "return self.batch, self.heads, self.group, self.j, self.i",
        MASKS + " -k 'boolean or bias'",
    ),
    Fault(
        "weights that are needed elsewhere are forgotten",
        REWRITE,
        "        if asserts.is_needed(reached):",
        "        if False:",
        "tests/patterns/test_scores.py -k returned",
    ),
    Fault(
        "gradients that are not wanted are computed",
        REWRITE,
        "needs = [bool(found.q), bool(found.k), bool(found.v)]",
        "needs = [True, True, True]",
        PARTIAL + " -k wanted",
    ),
    Fault(
        "the tags of checkpointing are lost",
        "inductor_gqa/emit.py",
        '    "recompute",\n',
        "",
        CHECKPOINTS + " -k runs_again",
    ),
    Fault(
        "an assert that is not proven goes as well",
        "inductor_gqa/asserts.py",
        "wanted is None or (name in have and have[name] == wanted)",
        "True",
        EXPORT,
    ),
    Fault(
        "the key of the caches knows no sources",
        PASSES,
        "own = (source_digest(), self.settings,",
        "own = (self.settings,",
        API + " -k uuid",
    ),
    Fault(
        "the key of the caches knows no settings",
        PASSES,
        "own = (source_digest(), self.settings,",
        "own = (source_digest(),",
        API + " -k uuid",
    ),
    Fault(
        "the digest knows no readers",
        PASSES,
        'for folder in (root, (root / "patterns").resolve()):',
        "for folder in (root,):",
        API + " -k digest",
    ),
    Fault(
        "a pass without a key is cached",
        PASSES,
        "return None  # an unknown pass",
        "continue  # an unknown pass",
        API + " -k plain_callable",
    ),
    Fault(
        "what verify finds is not looked at",
        "inductor_gqa/verify.py",
        "        if not error <= TOLERANCE * largest:\n",
        "        if False:\n",
        VERIFY + " -k 'caught and scale'",
    ),
    Fault(
        "verify remembers every site as right",
        "inductor_gqa/verify.py",
        "    if key in _agreed:\n",
        "    if True:\n",
        VERIFY + " -k 'caught and scale'",
    ),
    Fault(
        "old GPUs are accepted",
        "inductor_gqa/decide.py",
        "if capability < CAPABILITY:",
        "if False:",
        FAILURES + " -k gpu",
    ),
    Fault(
        "what was written of a site stays",
        PASSES,
        "            graph.erase_node(node)\n        if isinstance",
        "            pass\n        if isinstance",
        FAILURES + " -k writing",
    ),
    Fault(
        "the size is the first one seen",
        "inductor_gqa/emit.py",
        "            self.sizes[size] = self._node_of_size(size)",
        "            from .decide import hint\n\n            self.sizes[size] = hint(size)",
        SHAPES + " -k dynamic",
    ),
    Fault(
        "a sum of projections is taken apart before it turns",
        "patterns/elements.py",
        "(not reader.algebra and _are_results(a, b))",
        "False",
        ROPE + " -k 'sum_of_projections and adapter'",
    ),
)
