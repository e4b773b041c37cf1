"""The errors a person sees: one line each, and the exit status that goes with it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


class UserError(ValueError):
    """Something the user asked for cannot be done. The message says what is wrong, where, and what to do (exit 2)."""

    exit_code = 2


class TrainingFailure(RuntimeError):
    """Training started and had to stop: a non-finite loss, peers on different data, wrong weights (exit 1)."""

    exit_code = 1
