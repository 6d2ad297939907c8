"""Work that torch does in every compile and whose results no test looks at, left out.

Together it is a tenth of the time of a test that compiles without generating code. What is compiled
stays the same.
"""

import logging
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.guards


def _no_text(_graph: torch.fx.GraphModule, *_args: Any, **_options: Any) -> str:
    return ""


def leave_out_what_is_only_logged() -> None:
    """Structured traces, the text of every graph for them, and how long the guards take."""
    # Without a handler no record is made; pytest would format and keep every one.
    logging.getLogger("torch.__trace").handlers.clear()
    logging.getLogger("torch.__trace").disabled = True
    torch.fx.GraphModule.print_readable = _no_text
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # A collection after every compile; tests/conftest.py says how often Python makes its own.
    torch._dynamo.config.run_gc_after_compile = False
