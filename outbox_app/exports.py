"""Public names of a package, imported when they are first asked for.

Importing the package therefore imports neither Django nor models: setup tools, Spark's executors
and ``INSTALLED_APPS`` import it before those can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy(
    package: str, modules: dict[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package with these public names."""
    homes = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    def __dir__() -> list[str]:
        return sorted({*vars(import_module(package)), *homes})

    return __getattr__, __dir__, sorted(homes)
