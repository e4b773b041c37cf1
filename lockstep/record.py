"""Run a training script and record its first steps: what its model is called with, its gradients and its updates.

    python -m lockstep.record --output runs/mine train.py --my --args
    torchrun --nproc_per_node 4 -m lockstep.record --output runs/mine train.py --my --args

The model is found by itself: the first one that is called in training mode. In a script of your own, `with lockstep.record(model, "runs/mine"):`
around the loop does the same. `python -m lockstep.judge runs/mine` then judges it. Exit status: the script's own; 2 for a usage error.
"""

import argparse
import functools
import runpy
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.ground.errors import UserError, run_program
from lockstep.ground.files import require_writable_folder
from lockstep.ground.flags import Parser

if TYPE_CHECKING:
    import torch

    from lockstep.recorder.recorder import Recorder


def main(argv: list[str] | None = None) -> int:
    from lockstep.recorder.recorder import EVERY_MODULE, STEPS

    parser = Parser(prog="python -m lockstep.record", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the folder that is written; an earlier recording there is replaced",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="how many steps are recorded (default: %(default)s)"
    )
    parser.add_argument(
        "--modules",
        metavar="PATTERN",
        default=EVERY_MODULE,
        help="the modules whose outputs are recorded, such as 'model.layers.0.*'; '' for none (default: '%(default)s', all)",
    )
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")

    def body() -> int:
        options = parser.parse_args(argv)
        if options.steps < 1:
            raise UserError(f"--steps {options.steps}: give a number of at least 1")
        if not options.script.is_file():
            raise UserError(f"{options.script}: there is no such file; name the training script")
        output = options.output.absolute()  # a script may change the folder
        require_writable_folder(output, "--output")
        return _run(options.script, options.arguments, _Finding(output, options.steps, options.modules))

    return run_program("lockstep.record", body)


def _run(script: Path, arguments: list[str], finding: "_Finding") -> int:
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except UserError:
        raise
    except Exception:  # noqa: BLE001 - of the script: the recorder's own end the recording alone
        traceback.print_exc()
        return 1
    finally:
        finding.stop()
    if finding.recorder is None:
        why = (
            f"{script} called {finding.in_evaluation} in evaluation mode alone, so nothing was recorded; if it is trained, call model.train() before the loop"
            if finding.in_evaluation
            else f"{script} called no model in training mode, so nothing was recorded; name the script that trains"
        )
        raise UserError(why)
    return status


class _Finding:
    """Waits for the first model that is called in training, with gradients, and records it."""

    def __init__(self, output: Path, steps: int, modules: str):
        import torch
        from torch.optim import optimizer

        from lockstep.recorder import divided, patches, wrapped
        from lockstep.recorder.recorder import Recorder
        from lockstep.recorder.whole_run import Loaders

        self.recorder: Recorder | None = None
        self.updating = False
        self.in_evaluation = ""  # the first model that was called so where gradients are computed
        self.loaders = Loaders()
        self.make = functools.partial(
            Recorder, folder=output, steps=steps, modules=modules, loaders=self.loaders
        )
        # Called inside of an optimizer's step, whose begin was missed; and with what
        self.in_closure: tuple[torch.nn.Module, tuple, dict[str, Any]] | None = None
        real: Callable[..., Any] = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # inside of a model that was found
                return real(module, *arguments, **options)
            own = list(module.parameters())
            trained = module.training and any(parameter.requires_grad for parameter in own)
            trained &= not any(map(torch.nn.parameter.is_lazy, own))  # which this call makes
            trained &= not any(one.is_meta for one in own)  # such as a copy that counts operations
            # Lightning calls its own module with a batch for training_step, which calls the model.
            around = any(kind.__name__ == "LightningModule" for kind in type(wrapped.inner(module)).__mro__)
            first = self.recorder is None or _is_part_of(self.recorder.model, wrapped.inner(module))
            if not module.training and torch.is_grad_enabled() and any(one.requires_grad for one in own):
                self.in_evaluation = self.in_evaluation or type(module).__name__
            if first and trained and torch.is_grad_enabled() and not around:
                if self.updating:
                    self.in_closure = self.in_closure or (module, arguments, options)
                else:
                    self._record(module)
            return real(module, *arguments, **options)

        def begins(*_: Any) -> None:
            self.updating = True
            if self.recorder is not None:
                torch.nn.Module.__call__ = real  # type: ignore[method-assign]

        def ends(*_: Any) -> None:
            self.updating = False
            if self.in_closure is not None:
                self._restore()
                module, arguments, options = self.in_closure
                self._record(module).see_missed_step(arguments, options)

        hooks = (
            optimizer.register_optimizer_step_pre_hook(begins),
            optimizer.register_optimizer_step_post_hook(ends),
        )
        # Before the script asks: Python looks torch.autograd.grad up before it calls the model, in the arguments.
        sees_no_more = patches.see_asking()
        self._model_is_complete = divided.see_divisions()

        def restore() -> None:
            self._model_is_complete()
            sees_no_more()
            torch.nn.Module.__call__ = real  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()

        self._restore = restore
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    def _record(self, module: "torch.nn.Module") -> "Recorder":
        self._model_is_complete()
        if self.recorder is not None:
            self.recorder.discard()
        self.recorder = self.make(module)
        return self.recorder

    def stop(self) -> None:
        # The recorder has put its own functions in the places of these: what came last goes first.
        if self.recorder is not None:
            self.recorder.stop()
        self._restore()
        self.loaders.close()


def _is_part_of(part: "torch.nn.Module", module: "torch.nn.Module") -> bool:
    """A part of a model may be called alone, before training begins."""
    return part is not module and any(one is part for one in module.modules())


def batch(**tensors: "torch.Tensor") -> None:
    """Tensors that the loss needs and that the model is not called with, such as labels: of the micro batch that it is called with next.

    They are recorded with it, for `python -m lockstep.judge --loss`. Without a recording this does nothing.
    """
    from lockstep.recorder.recorder import NOTED

    NOTED.update(tensors)


class _Callable(types.ModuleType):
    """`lockstep.record` is this file, and what a user calls."""

    def __call__(
        self,
        model: "torch.nn.Module",
        folder: str | Path,
        steps: int | None = None,
        modules: str | None = None,
    ) -> Any:
        """Record the first steps (default 2) of the loop inside of `with`, into a folder of its own.

        `modules` is a pattern of the names of modules whose outputs are recorded (default: all).
        """
        from lockstep.recorder.recorder import EVERY_MODULE, STEPS, recording

        return recording(
            model, folder, STEPS if steps is None else steps, EVERY_MODULE if modules is None else modules
        )


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
