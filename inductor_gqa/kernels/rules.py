"""What one attention does to its scores and probabilities, as the bits of a single constexpr.

A kernel takes them as RULES and asks `if BIAS & RULES:`; a rule that is absent leaves no
instruction behind.
"""

import triton.language as tl

SCALED = tl.constexpr(1)  # scores carry `scale` before the exponential instead of inside it
SOFTCAP = tl.constexpr(2)
BIAS = tl.constexpr(4)
MASK = tl.constexpr(8)
KEY_MASK = tl.constexpr(16)
BAND_LO = tl.constexpr(32)
BAND_HI = tl.constexpr(64)
EXACT = tl.constexpr(128)  # hidden scores are changed by `fill`, not left out
FILL_ADDS = tl.constexpr(256)
KEEP = tl.constexpr(512)
SINK = tl.constexpr(1024)
EMPTY_ROWS = tl.constexpr(2048)  # a row may see no key and then averages V
FINE_TANH = tl.constexpr(4096)  # fp32: tanh without cancellation around zero

HIDES = tl.constexpr(8 | 16)
BAND = tl.constexpr(32 | 64)
# Scores may be huge and equal (finfo.min, -1e9): exponentials see differences, and one log-sum-exp
# cannot hold both such a maximum and the logarithm of the sum.
SHIFTED = tl.constexpr(4 | 128)
