"""Read models that a subscription keeps up to date, and how they are rebuilt."""
