"""An attention site: what a reader found, in the letters of the project, without a word about how
it was spelled.

The meaning of a site is `reference.attention`; readers (patterns/) make sites, the rewrite
(rewrite.py) replaces them. Axes of a site are named: the batch dims of the softmax "0", "1", ...,
the query position "i", the key position "j", the head dim of q and k "d", the head dim of v "e".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Node = torch.fx.Node


@dataclass(frozen=True)
class View:
    """A tensor of the graph, seen along the site's axes: element at `position` of `node`
    (patterns/axes.py)."""

    node: Node
    position: tuple[Any, ...]

    def __post_init__(self) -> None:
        # Views are keys of every comparison of lanes.
        object.__setattr__(self, "_hash", hash((self.node, self.position)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype


@dataclass(frozen=True)
class Table:
    """cos or sin of a rotation; its columns are axis "w".

    spread: each lane has its own column ("once") or its partner's ("swapped" halves, "crossed"
    neighbours), or a column serves the same lane of both halves ("halves") or the two lanes of a
    pair ("pairs"), or the two lanes of a pair have columns half the table "apart"; "all" lanes may
    share what varies by position only. times: tables that it is multiplied by, as by xPos's decay.
    """

    view: View
    spread: str
    times: tuple[Table, ...] = ()

    @property
    def views(self) -> tuple[View, ...]:
        return (self.view, *(table.view for table in self.times))


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of q or k: lanes start .. start+width turn in pairs, the others pass.

    sign: -1 where the graph turns the other way (the sine is negated).
    """

    cos: Table
    sin: Table
    start: int
    width: int
    interleaved: bool
    sign: float


@dataclass(frozen=True)
class Mask:
    """What hides a score. A key j is visible to query i if band_lo <= j - i <= band_hi and all
    tensors say so.

    keys: booleans over batch and key. tensors: booleans over anything; each with its sign (False:
    negated). bias: float tensors that are added, each times a number. fill: what a hidden score
    becomes (`fill_adds`: what is added to it).
    """

    band_lo: Any = None
    band_hi: Any = None
    keys: tuple[tuple[View, bool], ...] = ()
    tensors: tuple[tuple[View, bool], ...] = ()
    bias: tuple[tuple[View, float], ...] = ()
    fill: float = float("-inf")
    fill_adds: bool = False

    @property
    def hides(self) -> bool:
        return (
            self.band_lo is not None or self.band_hi is not None or bool(self.keys or self.tensors)
        )


@dataclass(frozen=True)
class Target:
    """A node of the graph that is an arrangement of one of our results."""

    node: Node
    position: tuple[Any, ...]  # of the result's element, per dim of `node`


@dataclass(frozen=True)
class Gradients:
    """The backward that the graph holds: where dO is, and which nodes are gradients of q, k and v
    as the site sees them."""

    grad_out: View
    q: tuple[Target, ...] = ()
    k: tuple[Target, ...] = ()
    v: tuple[Target, ...] = ()
    sink: tuple[Target, ...] = ()


@dataclass
class Site:
    """One attention. Sizes are ints or sympy expressions; groups are the site's axes that make up
    B, K and R."""

    anchor: Node
    q: View
    k: View
    v: View
    batch: tuple[Any, ...]
    kv_heads: tuple[Any, ...]
    group: tuple[Any, ...]
    query_length: Any
    key_length: Any
    head_dim: int
    value_dim: int
    scale: float
    scale_tensor: Node | None = None
    softcap: float = 0.0
    rotate_q: Rotation | None = None
    rotate_k: Rotation | None = None
    sink: View | None = None  # a logit per head that joins the softmax and has no value
    mask: Mask = field(default_factory=Mask)
    keep: tuple[tuple[View, bool], ...] = ()  # dropout: booleans that keep a weight
    keep_scale: float = 1.0  # what a kept weight is multiplied by
    drawn: tuple[Node, ...] = ()  # random ops that take the weights for their shape alone
    outputs: tuple[Target, ...] = ()
    weights: tuple[Target, ...] = ()  # where the weights themselves are needed
    gradients: Gradients | None = None
    is_sdpa: bool = False  # a call of F.scaled_dot_product_attention
    sdpa_has_mask: bool = False  # a call that was given its mask as a tensor
    zeros_empty_rows: bool = False  # a row that sees no key is zero, where a softmax makes it NaN
    notes: tuple[str, ...] = ()
