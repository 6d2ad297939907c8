"""Triton's interpreter where there is no GPU, hypothesis profiles, and the marker `gpu`."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Test files share strategies and oracles as `kernels.oracle`; pytest's importlib mode adds no path
# itself.
sys.path.append(str(Path(__file__).parent))

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when kernels are decorated, so it must be set before any of them is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def _teach_interpreter_bf16() -> None:
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


if not HAS_GPU:
    _teach_interpreter_bf16()

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=12, print_blob=True, **slow_is_fine)
settings.register_profile("thorough", max_examples=300, print_blob=True, **slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    # NumPy, which computes for the interpreter, warns about the infinities that a masked softmax is
    # made of.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or the CPU through Triton's interpreter."""
    return "cuda" if HAS_GPU else "cpu"
