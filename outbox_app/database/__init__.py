"""What the package asks of a database connection: transactions, lock waits, clocks, upserts."""
