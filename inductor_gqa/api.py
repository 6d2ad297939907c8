"""Switching the pass on and off: `enable`, `disable`, `enabled`, `explain`."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor_config

from . import lowering, report
from .passes import AttentionPass, Settings

log = logging.getLogger("inductor_gqa")


def enable(*, always: bool = False, strict: bool = False, verify: bool = False) -> None:
    """Fuses attention in everything that `torch.compile` compiles from here on.

    always: fuse whatever can be read, on any device and size; by default a site is fused where that
    is estimated to pay. strict: raise `NotFused` at compile time, listing every attention that is
    left, instead of leaving it silently. verify: at compile time, run each distinct attention in
    fp64 on random numbers against what it replaces, values and gradients, and leave it where they
    differ or where it cannot be run.

    Calling it again changes the settings. A custom joint pass that was set before keeps running,
    before ours. Functions that are compiled already stay as they are until `torch._dynamo.reset()`.
    torch keeps Inductor's settings per thread: a thread that compiles calls `enable()` itself.
    """
    current = inductor_config.joint_custom_pre_pass
    before = current.before if isinstance(current, AttentionPass) else current
    lowering.install()
    installed = AttentionPass(Settings(always, strict, verify), before)
    changes = not isinstance(current, AttentionPass) or current.settings != installed.settings
    inductor_config.joint_custom_pre_pass = installed
    if changes:
        _warn_if_compiled()


def disable() -> None:
    """Puts Inductor's setting back to what it was before `enable()`.

    Functions that are compiled already stay fused until `torch._dynamo.reset()`.
    """
    current = inductor_config.joint_custom_pre_pass
    if isinstance(current, AttentionPass):
        inductor_config.joint_custom_pre_pass = current.before


def is_enabled() -> bool:
    return isinstance(inductor_config.joint_custom_pre_pass, AttentionPass)


@contextmanager
def enabled(
    *, always: bool = False, strict: bool = False, verify: bool = False
) -> Generator[None, None, None]:
    """`enable()` for what is compiled (first called) inside the block; the setting before it comes
    back afterwards."""
    saved = inductor_config.joint_custom_pre_pass
    before = saved.before if isinstance(saved, AttentionPass) else saved
    lowering.install()
    inductor_config.joint_custom_pre_pass = AttentionPass(Settings(always, strict, verify), before)
    try:
        yield
    finally:
        inductor_config.joint_custom_pre_pass = saved


def _warn_if_compiled() -> None:
    """Inductor's settings are not guarded: compiled frames do not notice them."""
    from torch._dynamo import convert_frame

    compiled = getattr(getattr(convert_frame, "output_codes", None), "seen", ())
    if compiled:
        log.warning(
            "enable() after something was compiled: "
            "what is compiled already stays as it is until torch.compiler.reset()"
        )


def explain(
    fn: Callable[..., Any], *args: Any, always: bool = True, **kwargs: Any
) -> report.Report:
    """What would be fused in `fn(*args, **kwargs)`, and why the rest would be left.

    Compiles without code generation and without caches, runs the function once, and changes nothing
    else: neither the settings nor what is compiled already. With gradients enabled the backward is
    read as well. always=False also applies the table of what pays.
    """
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    def without_codegen(gm: torch.fx.GraphModule, _inputs: Any, **_options: Any) -> Any:
        view_to_reshape(gm)  # as Inductor does: strides are not what the views were traced with
        gm.recompile()
        return make_boxed_func(gm.forward)

    backend = functools.partial(compile_fx, inner_compile=without_codegen)
    with (
        enabled(always=always),
        inductor_config.patch(force_disable_caches=True),
        report.collected(details=True) as found,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings(
            "ignore", message="dynamo_pgo"
        )  # a consequence of the disabled caches
        torch.compile(_fresh(fn), backend=backend)(*args, **kwargs)
    return found


_explained = itertools.count()


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A callable with code of its own: Dynamo keys compiled frames, and its limit on recompiles, by
    code object."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    called.__code__ = called.__code__.replace(co_name=f"explained_{next(_explained)}")
    return called
