"""Errors, files, processes and progress: what knows nothing of training."""
