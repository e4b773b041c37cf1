"""Write the float64 reference of captured runs, and their replays (lockstep/verdict/reference.py).

    python -m lockstep.reference --capture_dir runs/dumps --init_weights_path runs/init.safetensors ...

All flags are those of train_ddp.py. Exit status as there.
"""

if __name__ == "__main__":
    from lockstep.ground import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

import dataclasses

from lockstep.ground import files, locks
from lockstep.ground.collective import init_alone
from lockstep.ground.errors import UserError, run_program
from lockstep.plan import command_line
from lockstep.plan.config import BASELINE, REPLAY
from lockstep.training import preflight
from lockstep.verdict import model_check, reference


def main() -> int:
    def body() -> int:
        config = command_line.parse_config(BASELINE)
        if config.capture_dir is None:
            raise UserError("--capture_dir is missing; give the folder for the reference's dump")
        inputs = preflight.load_inputs(config)
        preflight.check_environment(dataclasses.replace(config, run_name="reference"), inputs.architecture)
        model_check.check(config, inputs)
        replays = [f"{REPLAY}{folder.name}" for folder in reference.captured(config.capture_dir)]
        for name in replays:
            files.require_new_folder(config.capture_dir / name, "--capture_dir", overwrite=config.overwrite)
        with locks.held((config.capture_dir / "reference", "--capture_dir")):
            init_alone()
            print(reference.run(config, inputs))
        return 0

    return run_program("lockstep.reference", body)


if __name__ == "__main__":
    startup.end(main())
