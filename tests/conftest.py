"""Triton's interpreter where there is no GPU, hypothesis profiles, and the marker `gpu`."""

import gc
import importlib
import os
import sys
from pathlib import Path

# As many processes run tests as there are cores, so threads of theirs would wait for each other;
# read when torch is imported, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Test files share strategies and oracles as `kernels.oracle`; pytest's importlib mode adds no path
# itself.
sys.path.append(str(Path(__file__).parent))

BENCH = Path(__file__).resolve().parents[1] / "bench"
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # A pool of compile workers costs every process seconds and has no core of its own to run on.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from kernels.interpreter import use_interpreter

    use_interpreter()

# A compile makes a hundred thousand objects that stay: looking through all that torch holds after
# every 700 of them takes an eighth of the time of the tests that compile.
gc.set_threshold(50_000, 20, 50)

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=12, print_blob=True, **slow_is_fine)
settings.register_profile("thorough", max_examples=300, print_blob=True, **slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    # NumPy, which computes for the interpreter, warns about the infinities that a masked softmax is
    # made of.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    # Files in the order below; pytest-xdist would begin with those that have most tests.
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests come first: one at the end would run alone, beside an idle core.
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or the CPU through Triton's interpreter."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True, scope="session")
def _less_work() -> None:
    from less_work import leave_out_what_is_only_logged

    leave_out_what_is_only_logged()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """Imports a script of bench/, which later tests do not find imported."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if BENCH in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
            del sys.modules[name]
