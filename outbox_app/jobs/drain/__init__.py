"""The drain: committed rows reach the broker in batches."""
