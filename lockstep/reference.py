"""python -m lockstep.reference ...: write the float64 reference of captured runs (lockstep/verdict/reference.py)."""

from lockstep.ground import startup

if __name__ == "__main__":
    startup.begin()

    from lockstep.verdict.reference import main

    startup.end(main())
