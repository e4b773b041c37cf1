"""Processes: Ray, forked ranks, many runs in one start of the workers."""
