"""Find the model that a script trains, in this process or in those that the script starts, such as by torch.multiprocessing.spawn."""

import functools
import multiprocessing.process
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer

from lockstep.ground import user_file
from lockstep.recorder import divided, losses, patches, wrapped
from lockstep.recorder.recorder import Recorder
from lockstep.recorder.tree import MAIN
from lockstep.recorder.whole_run import Loaders

SPAWN = "torch.multiprocessing.spawn"
HERE: "list[Finding]" = []  # of this process, or of the one that it was forked from


class Finding:
    """Waits for the first model that is called in training, with gradients, and records it."""

    def __init__(self, output: Path, steps: int, modules: str):
        HERE[:] = [self]
        self.started = False  # processes that may train
        self.sees_starts = patches.see_calls(multiprocessing.process.BaseProcess, "start", self._see_start)
        self.output, self.options = output, (output, steps, modules)
        self.recorder: Recorder | None = None
        self.updating = False
        # Models that were called so where gradients are computed
        self.in_evaluation = weakref.WeakKeyDictionary[torch.nn.Module, None]()
        self.loaders = Loaders()
        self.make = functools.partial(
            Recorder, folder=output, steps=steps, modules=modules, loaders=self.loaders
        )
        # Called inside of an optimizer's step, whose begin was missed; and with what
        self.in_closure: tuple[torch.nn.Module, tuple, dict[str, Any]] | None = None
        real: Callable[..., Any] = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
            # Inside of a model that was found, or of none that is trained
            if torch.compiler.is_compiling() or torch.jit.is_tracing():
                return real(module, *arguments, **options)
            own = list(module.parameters())
            trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in own)
            trained &= not any(map(torch.nn.parameter.is_lazy, own))  # which this call makes
            trained &= not any(one.is_meta for one in own)  # such as a copy that counts operations
            # Lightning calls its own module with a batch for training_step, which calls the model.
            around = any(kind.__name__ == "LightningModule" for kind in type(wrapped.inner(module)).__mro__)
            first = self.recorder is None or _is_part_of(self.recorder.model, wrapped.inner(module))
            if trained and not around and not module.training:
                self.in_evaluation.setdefault(module)
            elif trained and not around and first:
                if self.updating:
                    self.in_closure = self.in_closure or (module, arguments, options)
                else:
                    self._record(module)
            return real(module, *arguments, **options)

        def begins(*_: Any) -> None:
            self.updating = True
            if self.recorder is not None:
                torch.nn.Module.__call__ = real  # type: ignore[method-assign]

        def ends(stepped: torch.optim.Optimizer, *_: Any) -> None:
            self.updating = False
            if self.recorder is None and self.in_closure is None:
                self._record_in_evaluation(stepped)
            if self.in_closure is not None:
                self._restore()
                module, arguments, options = self.in_closure
                self._record(module).see_missed_step(arguments, options)

        hooks = (
            optimizer.register_optimizer_step_pre_hook(begins),
            optimizer.register_optimizer_step_post_hook(ends),
        )
        # Before the script asks: Python looks torch.autograd.grad up before it calls the model, in the arguments.
        sees_no_more = patches.see_asking(), losses.see_losses()
        self._model_is_complete = divided.see_divisions()

        def restore() -> None:
            self._model_is_complete()
            for undo in sees_no_more:
                undo()
            torch.nn.Module.__call__ = real  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()

        self._restore = restore
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    def _record(self, module: torch.nn.Module) -> Recorder:
        self._model_is_complete()
        if self.recorder is not None:
            self.recorder.discard()
        self.recorder = self.make(module)
        return self.recorder

    def _record_in_evaluation(self, stepped: torch.optim.Optimizer) -> None:
        """The model that this optimizer holds, from its next step on, if it was not called in training mode."""
        held = {id(one) for group in stepped.param_groups for one in group["params"]}
        trained = (one for one in self.in_evaluation if any(id(own) in held for own in one.parameters()))
        model = next(trained, None)
        if model is not None:
            self._record(model).whole_run.in_evaluation = True

    def stop(self) -> None:
        # The recorder has put its own functions in the places of these: what came last goes first.
        if self.recorder is not None:
            self.recorder.stop()
        self._restore()
        self.sees_starts()
        self.loaders.close()
        HERE.clear()

    def _see_start(self, process: Any, *_: object) -> None:
        """A process that is started gets what looks for its model."""
        # If this process has a recorder, it is the one that trains
        if self.recorder is None and _may_train(process._target):
            self.started = True
            process._target = InProcess(process._target, *self.options)


@dataclass
class InProcess:
    """What a process runs, and the options of the recording."""

    target: Callable[..., Any]
    output: Path
    steps: int
    modules: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if HERE and HERE[0].recorder is not None:  # forked from a process that trains
            return self.target(*arguments, **options)
        finding = HERE[0] if HERE else Finding(self.output, self.steps, self.modules)
        try:
            return self.target(*arguments, **options)
        finally:
            finding.stop()


def _may_train(target: Any) -> bool:
    """Whether it is a function of the user's own, and none of a library, such as of a DataLoader's workers."""
    target = getattr(target, "func", target)  # of functools.partial
    name = getattr(target, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in {*MAIN, SPAWN} or (file is not None and not user_file.is_installed(Path(file)))


def _is_part_of(part: torch.nn.Module, module: torch.nn.Module) -> bool:
    """A part of a model may be called alone, before training begins."""
    return part is not module and any(one is part for one in module.modules())
