"""As for subscriptions."""

from tests.subscriptions.conftest import published, run

__all__ = ["published", "run"]
