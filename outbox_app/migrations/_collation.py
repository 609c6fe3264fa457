"""The code of this app's own migrations; see ``models.collation``."""

from ..models.collation import COLLATIONS, compare_bytes

__all__ = ["COLLATIONS", "compare_bytes"]
