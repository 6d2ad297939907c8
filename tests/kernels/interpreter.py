"""Triton's interpreter, in which kernels run without a GPU."""

import functools
import os

import torch


@functools.cache
def use_interpreter() -> None:
    """Triton reads this when kernels are decorated, so before any of them is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    _teach_bf16()
    _patch_once_a_launch()


def _patch_once_a_launch() -> None:
    """Triton replaces its whole language by interpreted functions at every call of a jitted
    function, also within a launch, for which that is done already: half of all its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain_patch, plain_launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    @functools.cache
    def modules_of(fn):
        return {name for name in ("tl", "core") if names[name] in map(id, fn.__globals__.values())}

    def patch(fn):
        if not modules_of(fn) <= patched:
            patched.update(modules_of(fn))
            return plain_patch(fn)
        return None

    def launch(self, *args, **named):
        patched.clear()
        try:
            return plain_launch(self, *args, **named)
        finally:
            patched.clear()

    names = {"tl": id(tl), "core": id(tl.core)}
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, launch


def _teach_bf16() -> None:
    """Triton's interpreter computes bf16 dots and casts on raw bit patterns, silently."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        return plain_dot(self, widen(a), widen(b), acc, input_precision, max_num_imprecise_acc)

    def cast(self, handle, to):
        if to.scalar == tl.bfloat16 and handle.dtype.scalar != tl.bfloat16:
            wide = torch.from_numpy(np.array(handle.data, np.float32))
            bits = wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits, tl.bfloat16)
        if to.scalar != tl.bfloat16:
            handle = widen(handle)
        return handle if to.scalar == handle.dtype.scalar else plain_cast(self, handle, to)

    builder.create_dot, builder.cast_impl = dot, cast
