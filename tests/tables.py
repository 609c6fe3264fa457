"""All models of the package, of each of its apps, and the addresses of their lists."""

from __future__ import annotations

from typing import Any

from outbox_app.capability import capabilities


def every_model() -> list[Any]:
    return [model for app in capabilities() for model in app.get_models()]


def short_name(url: str) -> str:
    """Return the name of an address of the admin without the label of its app."""
    labels = sorted((app.label for app in capabilities()), key=len, reverse=True)
    [label] = [each for each in labels if url.startswith(f"{each}_")][:1] or [""]
    return url.removeprefix(f"{label}_")


def list_of(name: str) -> str:
    """Return the address of the admin's list of the model with this name."""
    [label] = {model._meta.app_label for model in every_model() if model._meta.model_name == name}
    return f"/admin/{label}/{name}/"
