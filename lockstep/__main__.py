"""The command `lockstep`: record a training loop of your own, and judge it.

lockstep record --output runs/mine train.py --my --args       python -m lockstep.record
lockstep judge runs/mine                                      python -m lockstep.judge
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import importlib
import sys

from lockstep.ground.errors import UserError, run_program

COMMANDS = ("record", "judge")


def main() -> int:
    command, arguments = next(iter(sys.argv[1:]), ""), sys.argv[2:]
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command in COMMANDS:
        return importlib.import_module(f"lockstep.{command}").main(arguments)

    def body() -> int:
        raise UserError(f"{command or 'nothing'} is no command; choose from {', '.join(COMMANDS)}")

    return run_program("lockstep", body)


if __name__ == "__main__":
    startup.end(main())
