"""Installed versions, without importing what is asked for."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
