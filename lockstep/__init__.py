"""Says whether a distributed training run computes what one process would compute. `lockstep.record` records a loop of your own."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`lockstep.record`, which is imported when it is used."""
    if name == "record":
        import lockstep.record

        return lockstep.record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
