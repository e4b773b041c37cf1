"""Shared parts of the three training strategies; the root of the repository holds what people run."""
