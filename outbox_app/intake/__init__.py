"""Ways in: everything that turns a call into a row of the caller's transaction."""
