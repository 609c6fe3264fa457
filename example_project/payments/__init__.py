"""The payments of the shop's orders, in a separate database, without the shop's outbox."""
