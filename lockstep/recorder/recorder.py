"""Record what any training loop computes in its first steps, by hooks of torch alone.

    RUN/model.json                       the module tree (lockstep/recorder/tree.py), and how the run was made, by rank 0
    RUN/model.safetensors                its buffers, and attributes that are tensors
    RUN/rank_R/step_S.json               what rank R computed in step S: micro batches, optimizers, clipping, losses
    RUN/rank_R/run_N.json                what is kept of all steps (lockstep/recorder/whole_run.py)
    RUN/rank_R/step_S.safetensors        and its tensors; the shards as they are, each with its place in the whole

        batch/M/KEYWORD                  what the model was called with in micro batch M
        forward/M/returned.NAME          a tensor that the model returns, and none of its modules did
        target/M                         classes that a loss of the loop's own has for targets, -1 where none counts
        backward/M/returned.NAME         the gradient that arrives from the loop at a tensor that the model returns
        beside/M/NAME                    the part of a parameter's gradient that the loop's own loss gives it, not by way of what the model returns
        forward/M/MODULE, backward/M/MODULE            the output of a module, and the gradient that arrives at it
        buffer/M/NAME                    before micro batch M, if it is not what it was before an earlier one; MODULE:ATTRIBUTE for one that is no buffer
        random/M                         the state of torch's generator then, if the model drew from it; those of Python and numpy are in the JSON
        dropped/M/N                      on a GPU, which elements the N-th call of dropout kept: bits
        weight/NAME, gradient/NAME, updated/NAME       before the step, as the optimizer is given it, after the update
        state/KEY/NAME, attribute/KEY/NUMBER           of the optimizer, before the step; of what it is afterwards, a hash

What a step begins with is not written again where it is, by its hash, what the step before ended with.

A step ends with the optimizer's. All ranks write for themselves; nothing is gathered, and nothing is communicated.
"""

import contextlib
import functools
import inspect
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_structure, treespec_dumps

from lockstep.ground.errors import UserError
from lockstep.inputs.model import being_recomputed
from lockstep.recorder import (
    deepspeed_engine,
    divided,
    dropped,
    losses,
    parallelism,
    patches,
    surroundings,
    wrapped,
)
from lockstep.recorder.copies import copy_of, reached_beside
from lockstep.recorder.kept import digest_of, generators, order_of
from lockstep.recorder.model_outputs import map_left, mapped, outputs_of
from lockstep.recorder.module_hooks import OUTPUT, Hook, ModuleHooks, after_other_hooks
from lockstep.recorder.optimizers import PLAIN
from lockstep.recorder.state import state_of
from lockstep.recorder.step import harmless
from lockstep.recorder.updates import Updates
from lockstep.recorder.whole_run import Loaders, WholeRun

STEPS = 2
EVERY_MODULE = "*"
# By lockstep.record.batch, for the next training call of the model
NOTED: dict[str, torch.Tensor] = {}


class Recorder(Updates):
    """Hooks on one rank's model. After the last step that is recorded, only the samples of each call are hashed.

    `model` is the model itself or one that is wrapped already: by DDP, FSDP2, torch.compile. `modules` is a pattern of the names of
    modules whose outputs are recorded, such as "model.layers.0*". Raises UserError for FSDP1, whose flat
    parameters have no names, and for a model that cannot be built again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        folder: Path,
        steps: int = STEPS,
        modules: str = EVERY_MODULE,
        loaders: Loaders | None = None,
    ):
        super().__init__(model, folder, steps, modules)
        self.whole_run = WholeRun(lambda: self._rank_folder, self._is_of_another_model, loaders)
        call = Hook(self._see_call)
        self.always += [
            self.model.register_forward_pre_hook(call, with_kwargs=True, prepend=True).remove,
            self.model.register_forward_hook(Hook(self._see_output)).remove,
            self.whole_run.close,
            patches.see_skipped_steps(
                lambda: bool(self.optimizers) or self.whole_run.stepped, self._see_overflow
            ),
            patches.see_exit(self.stop),
        ]
        # Wrappers may turn autocast on inside of the model's call only.
        leaves = [module for module in self.model.modules() if module._parameters and not module._modules]
        self.removing += [leaf.register_forward_pre_hook(Hook(self._see_leaf)).remove for leaf in leaves]
        self.removing.append(patches.see_calls(torch.amp.GradScaler, "scale", self._see_scaling))
        self.removing.append(patches.see_asking())
        # Called when the model is called first
        self.when_complete: Callable[[], None] = lambda: None
        self.removing.append(dropped.see_dropout(self._sees_dropout, self._see_dropout))
        self.removing.append(patches.see_calls(torch.autograd, "backward", self._see_backward))
        losses.WATCHING.append(self._see_loss)
        self.removing.append(functools.partial(losses.WATCHING.remove, self._see_loss))
        self.root: float | None = None  # the value that a backward pass begins at
        # Losses that it has gone through, with their classes
        self.arriving: list[tuple[dict[str, Any], torch.Tensor | None]] = []
        shutil.rmtree(self._rank_folder, ignore_errors=True)  # an earlier recording

    def see_missed_step(self, arguments: tuple, options: dict[str, Any]) -> None:
        """Of a step that was over when the recording began, and what the model was called with: its samples count in the whole run."""
        self.whole_run.see_call(self._given(arguments, options))
        self.whole_run.stepped = True

    def _see_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """What is recorded of a step that a GradScaler skips begins anew."""
        self.whole_run.see_overflow(optimizer)
        if self.removing:
            self.overflowed += 1
            self._begin()

    def _see_scaling(self, scaler: torch.amp.GradScaler, *_: object) -> None:
        self.scale = scaler.get_scale()  # 1 if it is not enabled

    def _counts(self, number: int) -> bool:
        """Whether what arrives now in a micro batch counts: what torch.autograd.grad asked for does, unless a backward pass comes, too."""
        about = self.micro[number]
        if patches.ASKED:
            # The gradient of what the model is called with is for a later batch, as of an attack, unless it is differentiated in turn.
            of_batch = not torch.is_grad_enabled() and all(map(self._was_given, patches.ASKED[-1]))
            about["elsewhere"] |= of_batch and not about["reached"]
            about["asked"] = not of_batch and (about["asked"] or not about["used"])
            return about["asked"]
        about["reached"] = True
        if about["asked"]:
            self.kept.forget(f"backward/{number}/")
            about.update(asked=False, scalars={})
        return True

    def _was_given(self, one: Any) -> bool:
        own = self.given.get(id(one))
        return own is not None and own() is one

    def _trains(self) -> bool:
        """Whether what the model is called for now is its training: in evaluation mode, if it is never trained in another."""
        return torch.is_grad_enabled() and (self.model.training or self.whole_run.in_evaluation)

    @harmless
    def _see_module(self, name: str, tensor: torch.Tensor) -> None:
        which, number, _ = name.split("/", 2)
        if which == "forward" or self._counts(int(number)):
            self.kept.keep_shard(name, tensor, added=True)

    @torch.compiler.disable
    @harmless
    def _see_call(self, _module: torch.nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        if self._is_beside():
            return
        if not self._trains():
            self.whole_run.loaders.source = None  # the batch is of an evaluation
            if self.optimizers and not self.updating:  # an evaluation: the step before it is over
                self._write()
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.give_up(
                "the model is called inside of torch.func, such as vmap, where tensors have no values yet"
            )
            return
        if self.removing and not self.micro:
            parallelism.require_no_pipeline()
        given = self._given(arguments, options)
        noted = dict(NOTED)
        NOTED.clear()
        if not self.updating:  # else a closure is called again
            self.whole_run.see_call(given)
        if not self.removing:
            return
        if not self.watches_engine:
            self.watches_engine = deepspeed_engine.watch(self)
        if self.updating:
            return
        if self.optimizers:  # the step before is over: all its optimizers have stepped
            self._write()
            if not self.removing:
                return
        if self.given_up_on:
            self.skipped += 1
            self._begin()
        if self.hooks is None:  # only now: those that wrap a module have their hooks before these
            self.hooks = ModuleHooks(self.model, self.modules, self._see_module, changed=self.hooked)
            self.removing.append(self.hooks.remove)
        self.scale = 1.0  # until a GradScaler scales its loss
        self._begin_micro_batch(given, noted)

    def _begin_micro_batch(self, given: dict[str, Any], noted: dict[str, Any]) -> None:
        """`given` is what the model is called with, `noted` what the loop has said beside it."""
        assert self.hooks is not None
        number = len(self.micro)
        if number == 0:
            self.when_complete()
            if self.rank == 0 and not self.surroundings:  # which writes them
                self.surroundings = surroundings.describe(self.model)
            own = wrapped.named_parameters(self.model)
            self.frozen = {name: digest_of(one) for name, one in own.items() if not one.requires_grad}
        state = state_of(self.model).items()
        changed = {name: one for name, one in state if self.attributes.get(name) != one[0]}
        of_state = [pair for _, tensors in changed.values() for pair in tensors.items()]
        for name, buffer in [*self.model.named_buffers(), *of_state]:
            last, self.buffers[name] = self.buffers.get(name), digest_of(buffer)
            if last != self.buffers[name]:
                self.kept.keep_shard(f"buffer/{number}/{wrapped.clean(name)}", buffer)
        self.hooks.begin(number)
        about: dict[str, Any] = {
            "tensors": [],
            "plain": {},
            "left_out": [],
            "together": number > 0
            and not self.micro[-1]["used"],  # called before the last one was trained on
            "asked": False,  # whether what arrived was asked for by torch.autograd.grad alone
            "used": False,  # whether a gradient arrives at what the model returns
            "reached": False,  # by a backward pass
            "elsewhere": False,  # in the loss of another model, such as a discriminator's
            "differentiated": False,  # whether the loop has a gradient of this gradient
            "scalars": {},  # those that arrive at scalars
            "losses": [],  # that the loop computes
            "scale": 1.0,
            "autocast": None,
            "dropouts": 0,  # calls of dropout whose random numbers a CPU does not draw
            **parallelism.dtypes_of(self.model),
            "casts_inputs": parallelism.casts_inputs(self.model),
            "orders": {},
            "attributes": {name: value for name, (value, _) in changed.items()},
            "evaluated": [
                wrapped.clean(name) for name, module in self.model.named_modules() if not module.training
            ],
        }
        tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        self.given |= {id(one): weakref.ref(one) for one in tensors}
        self._keep_inputs(number, about, given, noted)
        self.micro.append(about)
        self.generators = generators()
        self.begun_at = torch.autograd._get_sequence_nr()
        self.random, self.frames = torch.get_rng_state(), parallelism.compiled_frames()

    def _keep_inputs(
        self, number: int, about: dict[str, Any], given: dict[str, Any], noted: dict[str, Any]
    ) -> None:
        odd = [name for name, one in given.items() if not _has_known_structure(one)]
        about["left_out"] += [f"{name} is a {type(given[name]).__name__}" for name in odd]
        found, structure = tree_flatten_with_path({name: given[name] for name in given if name not in odd})
        inputs = {".".join(str(key).strip("[]'.") for key in path): value for path, value in found}
        about |= {"inputs": list(inputs), "structure": treespec_dumps(structure)}
        twice = sorted(noted.keys() & inputs.keys())
        if twice:
            raise UserError(
                f"lockstep.record.batch({twice[0]}=...): the model is called with it, so it is recorded already"
            )
        for name, value in {**inputs, **noted}.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self.kept.keep(f"batch/{number}/{name}", value)
                about["tensors"].append(name)
                order = order_of(value)
                about["orders"] |= {name: order} if order else {}
            elif isinstance(value, PLAIN):
                about["plain"][name] = value
            else:
                about["left_out"].append(f"{name} is a {getattr(value, 'layout', type(value).__name__)}")

    def _sees_dropout(self) -> bool:
        return self.hooks is not None and self.hooks.inside and not being_recomputed()

    @harmless
    def _see_dropout(self, kept: Callable[[], torch.Tensor | None]) -> None:
        number, about = len(self.micro) - 1, self.micro[-1]
        found = kept()
        if found is not None:
            self.kept.keep(f"dropped/{number}/{about['dropouts']}", dropped.packed(found))
        about["dropouts"] += 1

    def _is_compiled(self) -> bool:
        """Whether torch.compile made code of the model, or of a part of it: hooks see nothing inside, or it was made in a forward pass."""
        assert self.hooks is not None
        self.model_compiled |= parallelism.compiled_frames() > self.frames
        return self.model_compiled or bool(
            self.modules == EVERY_MODULE and self.hooks.handles and not self.hooks.seen
        )

    def _given(self, arguments: tuple, options: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with, by the names of its own parameters."""
        given = self.signature.bind_partial(*arguments, **options).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given

    def _is_beside(self) -> bool:
        """Whether a call of the model is none that the loop makes to have what it returns."""
        return being_recomputed() or self._calls_itself() or torch.jit.is_tracing()

    def _calls_itself(self) -> bool:
        """Whether the model is called inside of its own call, such as a loss that is its forward method, too."""
        frame, calls = sys._getframe(), 0
        while frame.f_back is not None and calls < 2:
            frame = frame.f_back
            if frame.f_code is torch.nn.Module._call_impl.__code__:
                calls += frame.f_locals["self"] is self.model
        return calls > 1

    def _see_leaf(self, _module: torch.nn.Module, _arguments: tuple) -> None:
        if self.micro and self.micro[-1]["autocast"] is None and not being_recomputed():
            self.micro[-1]["autocast"] = parallelism.autocast_of(self.model)

    @torch.compiler.disable
    @harmless
    def _see_output(self, _module: torch.nn.Module, _arguments: tuple, output: Any) -> Any:
        """Gives the loop copies of what the model returns (lockstep/recorder/copies.py)."""
        trains = self._trains()
        over = trains and not (self.removing and self.micro)
        if over or not torch.is_grad_enabled() or self._is_beside():
            return None
        loss, logits = outputs_of(output)
        if not trains:
            self.whole_run.see_evaluation(logits if loss is None else loss)
            return None
        if self.updating:  # a closure that was called again
            return None
        of_modules: set[int] = set()
        if self.hooks is not None:
            of_modules |= self.hooks.returned.keys()
            self.hooks.end()
        number, about = len(self.micro) - 1, self.micro[-1]
        if not torch.equal(self.random, torch.get_rng_state()):
            about.update(drawn=True, compiled=self._is_compiled())
            self.kept.keep(f"random/{number}", self.random)
        now = generators()
        about["generators"] = {name: one for name, one in self.generators.items() if one != now[name]}
        if loss is not None:
            about["loss_dtype"] = str(loss.dtype)
        if loss is not None and loss.requires_grad and logits is None:
            # Nothing else can be held against the run, which may train on a part of the loss.
            about.update(loss=float(loss.detach()), used=True)

        copies: set[int] = set()

        def watched(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in copies:  # in a list that several modules have
                return tensor
            value = float(tensor.detach()) if tensor is loss else None
            is_new = tensor.ndim and id(tensor) not in of_modules and ":" not in name
            if is_new and fnmatchcase("returned", self.modules):
                self._see_module(f"forward/{number}/returned.{name}", tensor)
            if not tensor.requires_grad:
                return tensor
            own = copy_of(tensor, has_its_hooks=loss is not None and tensor is not loss)
            copies.add(id(own))
            assert own.grad_fn is not None
            self.returned_at = own.grad_fn._sequence_nr()
            place = f"backward/{number}/returned.{name}"
            after_other_hooks(own, functools.partial(self._arrives, about, place, value))
            return own

        returned = mapped(output, watched)
        map_left(self.model, watched, self.begun_at)
        return returned

    @harmless
    def _arrives(
        self, about: dict[str, Any], place: str, loss: float | None, gradient: torch.Tensor | None
    ) -> None:
        """At what the model returned, from the loop. It may leave the model's own loss; DDP may then say that None arrives."""
        if gradient is None:
            return
        # Gradients are only enabled in a backward pass that makes a graph of itself.
        about["differentiated"] |= torch.is_grad_enabled()
        if not self._counts(int(place.split("/")[1])):
            return
        about.update(used=True, elsewhere=False, scale=self.scale)
        for seen, classes in self.arriving:
            about["losses"].append(seen)
            if classes is not None:
                self.kept.keep(f"target/{place.split('/')[1]}", classes)
        self.arriving = []
        self.arrived_since = True
        if loss is not None:
            about["loss"] = loss
        if gradient.ndim:
            self.kept.keep_shard(place, gradient, added=True)
        else:
            name = place.partition("/returned.")[2]
            about["scalars"][name] = about["scalars"].get(name, 0.0) + float(gradient)

    @harmless
    def _see_backward(self, roots: Any, *gradients: object) -> None:
        """A loss of the loop's own may depend on parameters themselves, such as weights of its terms, or a head that the model does not call."""
        if being_recomputed():  # a reentrant checkpoint goes backward inside of the backward pass
            return
        while self.beside:  # the loop may go through its loss once more
            self.beside.pop().remove()
        if not self.micro or self.optimizers:
            return
        self.root, self.arriving = losses.value_of(roots, *gradients[:1]), []
        # Of FSDP2, whole ones, which are in the places of their shards
        names = {id(one): wrapped.clean(name) for name, one in self.model.named_parameters()}
        leaves, inside = reached_beside(roots, self.begun_at, self.returned_at)
        if inside:
            outputs = (cast(dict[str, Any], one.metadata).get(OUTPUT) for one in inside)
            self.micro[-1]["around"] = next(filter(None, outputs), "")
        for node, place, leaf in leaves:
            if id(leaf) in names:
                name = f"beside/{len(self.micro) - 1}/{names[id(leaf)]}"
                handle = node.register_hook(functools.partial(self._see_beside, name, place))
                self.beside.append(handle)

    @harmless
    def _see_loss(self, loss: losses.Loss, result: torch.Tensor) -> None:
        outside = self.hooks is not None and not self.hooks.inside
        plain = torch._C._functorch.peek_interpreter_stack() is None
        if self.micro and outside and plain and not being_recomputed():
            result.register_hook(functools.partial(self._see_weight, loss))

    @harmless
    def _see_weight(self, loss: losses.Loss, gradient: torch.Tensor) -> None:
        """Of a loss; it is of this model if a gradient arrives there, too, in the same backward pass."""
        self.arriving.append((loss.about(gradient, None if patches.ASKED else self.root), loss.classes()))

    @harmless
    def _see_beside(
        self, name: str, place: int, gradients: tuple[torch.Tensor | None, ...], _: object
    ) -> None:
        gradient = gradients[place]
        if gradient is not None:
            self.kept.keep_shard(name, gradient, added=True)


def _has_known_structure(value: Any) -> bool:
    """Whether torch can write what classes a value is nested in."""
    try:
        treespec_dumps(tree_structure(value))
    except NotImplementedError:
        return False
    return True


@contextlib.contextmanager
def recording(
    model: torch.nn.Module, folder: str | Path, steps: int = STEPS, modules: str = EVERY_MODULE
) -> Iterator[Recorder]:
    """Record the first `steps` steps of the loop inside. An earlier recording in the folder is replaced."""
    recorder = Recorder(model, Path(folder), steps, modules)
    recorder.when_complete = divided.see_divisions()
    recorder.removing.append(losses.see_losses())
    try:
        yield recorder
    finally:
        recorder.when_complete()
        recorder.stop()
