"""Lanes that are read together and turn out to belong to different operands."""

from __future__ import annotations

from typing import Any


class Split(Exception):
    """The lanes read together belong to different operands: `parts` are lane numbers that stay
    together."""

    def __init__(self, parts: list[tuple[int, ...]]) -> None:
        super().__init__(f"{len(parts)} groups of lanes")
        self.parts = parts


def same_owner(owners: list[Any]) -> None:
    """Raises Split unless all lanes have one owner."""
    if len(set(owners)) > 1:
        groups: dict[Any, list[int]] = {}
        for lane, owner in enumerate(owners):
            groups.setdefault(owner, []).append(lane)
        raise Split([tuple(lanes) for lanes in groups.values()])
