"""What commands and the admin call: loops, status, retention, log lines."""
