"""The error of strict mode."""

from __future__ import annotations

from typing import Any

from torch._dynamo import exc

# Dynamo wraps what a backend raises in BackendCompilerFailed, whose message begins with the
# backend's name; what knows how to shorten its own traceback it passes on as it is.
_Plain: Any = getattr(exc, "ShortenTraceback", RuntimeError)


class NotFused(_Plain):
    """Raised in strict mode: at least one attention was left. The message lists each with its
    reason."""

    def __init__(self, message: str) -> None:
        if _Plain is RuntimeError:
            super().__init__(message)
        else:
            super().__init__(message, first_useful_frame=None)
