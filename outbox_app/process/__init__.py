"""What every long-running process has: leases, waiting, a watchdog, back-off, counters."""
