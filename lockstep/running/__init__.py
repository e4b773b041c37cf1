"""Processes: Ray Train, launchers, locks, many runs in one start of the workers."""
