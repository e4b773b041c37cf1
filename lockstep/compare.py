"""python -m lockstep.compare DUMP DUMP ...: compare captured runs, tensor by tensor (lockstep/tensors/comparison.py)."""

from lockstep import startup

if __name__ == "__main__":
    startup.begin()

    from lockstep.tensors.comparison import main

    startup.end(main())
