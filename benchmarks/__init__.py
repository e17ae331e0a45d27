"""Programs that measure: each one command, a table, JSON."""
