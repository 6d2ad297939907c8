"""What happens where a kernel cannot run: one warning, and the same numbers from plain PyTorch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("inductor_gqa")


MOST = 8  # kinds of calls that may fail before none is tried any more


def or_reference(
    kernel: Callable[..., Any], reference: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """`kernel`, and `reference` for each kind of call (shapes, dtypes and numbers) that has failed
    by the kernel's own fault: that does not compile, or asks for more than the device has. An error
    of the device itself, or a lack of memory, is nobody's to repair and is raised."""
    failed: set[Any] = set()

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        if len(failed) < MOST and not (failed and _kind(args) in failed):
            try:
                return kernel(*args)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as why:
                if not failed:
                    log.warning(
                        "%s: the kernel failed with %r, plain PyTorch computes such calls from "
                        "here on (`python -m inductor_gqa doctor` looks for the cause)",
                        name,
                        why,
                        exc_info=log.isEnabledFor(logging.DEBUG),
                    )
                failed.add(_kind(args))
        return reference(*args)

    return run


def _kind(args: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(x.shape), x.dtype)
        if isinstance(x, torch.Tensor)
        else _kind(x)
        if isinstance(x, list | tuple)
        else repr(x)
        for x in args
    )
