"""What every long-running process has: loops, leases, waiting, wake-up, back-off, counters."""
