"""Databases, one module a vendor: connections for those who plan and for those who read."""
