"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    namespace: dict[str, Any], home_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        namespace: The package's `globals()`.
        home_of: The submodule that each name comes from.
    """
    package = namespace["__name__"]

    def getattr_(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        return namespace[name]

    def dir_() -> list[str]:
        return sorted({*namespace, *home_of})

    return getattr_, dir_
