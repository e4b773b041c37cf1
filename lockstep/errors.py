"""The errors a person sees: one line each, and the exit status that goes with it."""


class UserError(ValueError):
    """Something the user asked for cannot be done. The message says what is wrong, where, and what to do (exit 2)."""

    exit_code = 2


class TrainingFailure(RuntimeError):
    """Training started and had to stop: a non-finite loss, peers on different data, wrong weights (exit 1)."""

    exit_code = 1
