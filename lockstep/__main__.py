"""The command `lockstep`: record a training loop of your own, and judge it.

lockstep record --output runs/mine train.py --my --args       python -m lockstep.record
lockstep judge runs/mine                                      python -m lockstep.judge
"""

import runpy
import sys

from lockstep.ground.errors import UserError, run_program

COMMANDS = ("record", "judge")


def main() -> int:
    command = next(iter(sys.argv[1:]), "")
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command in COMMANDS:
        sys.argv[:2] = [f"lockstep {command}"]
        runpy.run_module(f"lockstep.{command}", run_name="__main__")  # ends the program

    def body() -> int:
        raise UserError(f"{command or 'nothing'} is no command; choose from {', '.join(COMMANDS)}")

    return run_program("lockstep", body)


if __name__ == "__main__":
    sys.exit(main())
