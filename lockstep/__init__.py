"""Shared parts of the three training strategies; the root of the repository holds what people run."""

__version__ = "0.1.0"
