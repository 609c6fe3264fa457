"""The payments of the shop's orders, in a database of their own that cannot hold the outbox."""
