"""Find the model that a script trains.

It may be in this process, or in one that the script starts, such as by torch.multiprocessing.spawn.
"""

import multiprocessing.process
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.optim import optimizer

from lockstep.ground import user_file
from lockstep.recorder import divided_attributes, losses, patches, wrapped
from lockstep.recorder.callers import callers
from lockstep.recorder.names import MAIN
from lockstep.recorder.recorder import Recorder
from lockstep.recorder.whole_run import Loaders

SPAWN = "torch.multiprocessing.spawn"
# The `ModelFinder` of this process, or of the process that it was forked from
HERE: "list[ModelFinder]" = []


class ModelFinder:
    """Waits for the first model that is called in training mode, with gradients enabled, and records it."""

    def __init__(self, output: Path, steps: int, modules: str):
        HERE[:] = [self]
        self.started = False  # whether processes were started that may train
        self.output, self.options = output, (output, steps, modules)
        self.recorder: Recorder | None = None
        self.updating = False
        # Models that were called in evaluation mode with gradients enabled
        self.in_evaluation = weakref.WeakKeyDictionary[torch.nn.Module, None]()
        self.loaders = Loaders()
        # (model, arguments, options, method that calls it) of a call inside of an optimizer's step, whose begin was missed
        self.in_closure: tuple[torch.nn.Module, tuple, dict[str, Any], str] | None = None
        real: Callable[..., Any] = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
            # Such a call is inside of a model that was found, or of one that is not trained.
            if torch.compiler.is_compiling() or torch.jit.is_tracing():
                return real(module, *arguments, **options)
            parameters = list(module.parameters())
            is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in parameters)
            # Lazy parameters are made in this call.
            is_trained &= not any(map(torch.nn.parameter.is_lazy, parameters))
            # Such as a copy that counts operations
            is_trained &= not any(tensor.is_meta for tensor in parameters)
            # Lightning calls its own module with a batch for training_step, which calls the model inside.
            is_around = any(cls.__name__ == "LightningModule" for cls in type(wrapped.inner(module)).__mro__)
            # The first model, or a model around the one that is recorded so far
            is_first = self.recorder is None or _is_part_of(self.recorder.model, wrapped.inner(module))
            if is_trained and not is_around and not module.training:
                self.in_evaluation.setdefault(module)
            elif is_trained and not is_around and is_first:
                if not self.updating:
                    self._record(module).part_of = _method_that_calls(module)
                elif self.in_closure is None:
                    self.in_closure = module, arguments, options, _method_that_calls(module)
            return real(module, *arguments, **options)

        def begins(*_: Any) -> None:
            self.updating = True
            if self.recorder is not None:
                undo_call()

        def ends(stepped_optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.updating = False
            if self.recorder is None and self.in_closure is None:
                self._record_in_evaluation(stepped_optimizer)
            if self.in_closure is not None:
                undo_call()
                (module, arguments, options, method), self.in_closure = self.in_closure, None
                recorder = self._record(module)
                recorder.part_of = method
                recorder.see_missed_step(arguments, options)

        undo_call = patches.replace(torch.nn.Module, "__call__", call)
        self._undo_divisions = divided_attributes.see_divisions()
        self.undos = [
            undo_call,
            self._undo_divisions,
            # These are replaced before a model is found: in torch.autograd.grad(loss(model(x)), ...), Python looks the
            # function up before it calls the model.
            patches.see_asking(),
            losses.see_losses(),
            optimizer.register_optimizer_step_pre_hook(begins).remove,
            optimizer.register_optimizer_step_post_hook(ends).remove,
            patches.see_calls(multiprocessing.process.BaseProcess, "start", self._see_start),
            self.loaders.close,
        ]

    def _record(self, module: torch.nn.Module) -> Recorder:
        self._undo_divisions()
        if self.recorder is not None:
            self.recorder.discard()
        self.recorder = Recorder(module, *self.options, self.loaders)
        return self.recorder

    def _record_in_evaluation(self, stepped_optimizer: torch.optim.Optimizer) -> None:
        """Record the model that this optimizer holds, from its next step on, if it was called in evaluation mode alone."""
        held = {id(tensor) for group in stepped_optimizer.param_groups for tensor in group["params"]}
        trained = (
            module
            for module in self.in_evaluation
            if any(id(tensor) in held for tensor in module.parameters())
        )
        model = next(trained, None)
        if model is not None:
            self._record(model).whole_run.in_evaluation = True

    def see_error(self, error: Exception) -> None:
        """Note the error that ends the run."""
        if self.recorder is not None:
            self.recorder.see_error(error)

    def stop(self) -> None:
        # The recorder has replaced functions that were replaced here before: the last replacement is undone first.
        if self.recorder is not None:
            self.recorder.stop()
        for undo in self.undos:
            undo()
        HERE.clear()

    def _see_start(self, process: Any, *_: object) -> None:
        """Let a process that is started look for its model."""
        # A process that has a recorder is itself the one that trains.
        if self.recorder is None and _may_train(process._target):
            self.started = True
            process._target = InProcess(process._target, *self.options)


@dataclass
class InProcess:
    """Runs the `target` of a process, and records the model that it trains."""

    target: Callable[..., Any]
    output: Path
    steps: int
    modules: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # If it was forked from a process that trains
        if HERE and HERE[0].recorder is not None:
            return self.target(*arguments, **options)
        finding = HERE[0] if HERE else ModelFinder(self.output, self.steps, self.modules)
        try:
            return self.target(*arguments, **options)
        except Exception as error:
            finding.see_error(error)
            raise
        finally:
            finding.stop()


def _may_train(target: Any) -> bool:
    """Whether the function is the user's own, and not a library's, such as that of a DataLoader's workers."""
    # The function of a functools.partial
    target = getattr(target, "func", target)
    name = getattr(target, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in {*MAIN, SPAWN} or (file is not None and not user_file.is_installed(Path(file)))


def _method_that_calls(part: torch.nn.Module) -> str:
    """Return the method of a larger model that calls a part of it, as CLASS.METHOD, where the loop does not call the model itself.

    Of methods that call each other, it is the first. Returns "" if there is none. What the rest of the model computes is not seen.
    """
    held, found = {id(parameter) for parameter in part.parameters()}, ""
    for code, owner in callers(_is_method):
        # A constructor of a module may call a part before that of torch has begun.
        is_module = isinstance(owner, torch.nn.Module) and "_modules" in vars(owner)
        is_around = is_module and _is_part_of(part, owner)
        if is_around and any(id(parameter) not in held for parameter in owner.parameters()):
            found = f"{type(owner).__name__}.{code.co_name}"
        elif found:
            break
    return found


def _is_method(code: CodeType) -> bool:
    around = code.co_qualname.rpartition(".")[0]
    return bool(around) and not around.endswith("<locals>")


def _is_part_of(part: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether `part` is inside of `module`. A part of a model may be called alone, before training begins."""
    return part is not module and any(child is part for child in module.modules())
