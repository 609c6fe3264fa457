"""Windows, one a database vendor. The setting WINDOWS replaces them."""
