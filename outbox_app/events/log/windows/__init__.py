"""Windows, one for each database vendor. The setting WINDOWS replaces them."""
