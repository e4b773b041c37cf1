"""Train with any strategy: one of the registry, or your own.

    python -m lockstep.train --strategy my_parallel.py:MyStrategy --dp_size 2 --tp_size 2         under Ray Train
    torchrun --nproc_per_node 4 -m lockstep.train --strategy my_parallel.py:MyStrategy            in place

All other flags are those of train_fsdp.py --help. Exit status as there.
"""

import sys


def split(argv: list[str]) -> tuple[str, list[str]]:
    """The strategy and the rest of a command line. Raises UserError if none is named."""
    from lockstep.errors import UserError

    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag == "--strategy":
            rest = argv[index + 1 :]
            if equals:
                return value, argv[:index] + rest
            if rest:
                return rest[0], argv[:index] + rest[1:]
    raise UserError("--strategy is missing: a name such as fsdp, or path/to/file.py:Class")


def main() -> int:
    from lockstep.errors import UserError, run_program
    from lockstep.launch import launch

    try:
        strategy, rest = split(sys.argv[1:])
    except UserError as error:
        problem = error

        def refuse() -> int:
            raise problem

        return run_program("lockstep.train", refuse)
    return launch(strategy, rest)


if __name__ == "__main__":
    from lockstep import startup

    startup.begin()

    startup.end(main())
