"""inductor_gqa: fuses eager grouped-query attention with rotary embeddings under `torch.compile`.

    import inductor_gqa
    inductor_gqa.enable()
    model = torch.compile(model)

The model is unchanged: attention spelled out in matmuls and softmax is recognised in the graph that
Inductor compiles, forward and backward, and replaced by fused Triton kernels. What is not
recognised, or would not pay, is left as it was; `explain` says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["NotFused", "Report", "disable", "enable", "enabled", "explain", "is_enabled"]

if TYPE_CHECKING:
    from .api import disable, enable, enabled, explain, is_enabled
    from .errors import NotFused
    from .report import Report

_HOMES = {"NotFused": "errors", "Report": "report"}


def __getattr__(name: str) -> Any:
    """Loads the implementation (and with it Inductor) at first use, so that importing the package
    costs next to nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = import_module(f"{__name__}.{_HOMES.get(name, 'api')}")
    return getattr(home, name)
