"""What happens where a kernel cannot run: one warning, and the same numbers from plain PyTorch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("inductor_gqa")


def or_reference(
    kernel: Callable[..., Any], reference: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """`kernel`, and `reference` from the first failure on that is the kernel's own: one that does
    not compile, or asks for more than the device has. An error of the device itself, or a lack of
    memory, is nobody's to repair and is raised."""
    failed: set[str] = set()

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        if not failed:
            try:
                return kernel(*args)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as why:
                failed.add(repr(why))
                log.warning(
                    "%s: the kernel failed with %r, plain PyTorch computes it from here on "
                    "(`python -m inductor_gqa doctor` looks for the cause)",
                    name,
                    why,
                    exc_info=log.isEnabledFor(logging.DEBUG),
                )
        return reference(*args)

    return run
