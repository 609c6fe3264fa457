"""Windows, one for each database vendor."""
