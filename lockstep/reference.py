"""python -m lockstep.reference ...: write the float64 reference of captured runs (lockstep/tensors/exact_run.py)."""

from lockstep import startup

if __name__ == "__main__":
    startup.begin()

    from lockstep.tensors.exact_run import main

    startup.end(main())
