"""The test suite. A tier is a folder; ``tests.servers`` starts the servers that it needs."""
