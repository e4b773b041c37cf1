"""Record what any training loop computes in its first steps, by hooks of torch alone.

    RUN/model.json                  the module tree (lockstep/recorder/tree.py), and how the run was made, by rank 0
    RUN/model.safetensors           its buffers, and attributes that are tensors
    RUN/rank_R/step_S.json          what rank R computed in step S: micro batches, optimizers, clipping, losses
    RUN/rank_R/run_N.json           what is kept of all steps (lockstep/recorder/whole_run.py)
    RUN/rank_R/step_S.safetensors   the tensors of step S: this rank's shards. The JSON has their places in the whole

        batch/M/KEYWORD             what the model was called with in micro batch M
        forward/M/returned.NAME     a tensor that the model returns and that no module returned; of a stage: any
        backward/M/given.NAME       in a stage of a pipeline: the gradient at what the stage before returned
        backward/M/returned.NAME    the gradient that arrives from the loop at a tensor that the model returns
        target/M                    targets of a loss of the loop's own, if they are classes; -1 where none counts
        beside/M/NAME               the part of a parameter's gradient that the loop's own loss gives it directly,
                                    not by way of what the model returns
        forward/M/MODULE            the output of a module
        backward/M/MODULE           the gradient that arrives at the output
        buffer/M/NAME               a buffer before micro batch M, if it has changed since it was last written;
                                    MODULE:ATTRIBUTE for a tensor that is no buffer
        random/M                    the state of torch's generator before micro batch M, if the model drew from it;
                                    those of Python and numpy are in the JSON
        dropped/M/N                 on a GPU, which elements the N-th call of dropout kept: bits
        weight/NAME                 a parameter before the step
        gradient/NAME               its gradient, as the optimizer is given it
        unclipped/NAME              its gradient before it was clipped by value
        updated/NAME                the parameter after the update
        state/KEY/NAME              optimizer state of a parameter, before the step
        attribute/KEY/NUMBER        an attribute of an optimizer, before the step
                                    (of state and attributes after the step, a hash is kept)

A large tensor is left out if a rank has written the same content already (lockstep/recorder/contents.py).

A step ends with the optimizer's step. Each rank writes for itself: nothing is gathered or communicated.
"""

import contextlib
import functools
import inspect
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
    divided_attributes,
    dropout_masks,
    losses,
    parallelism,
    patches,
    surroundings,
    tree,
    wrapped,
)
from lockstep.recorder.callers import callers
from lockstep.recorder.contents import remove_earlier
from lockstep.recorder.copies import copy_of, reached_beside
from lockstep.recorder.model_outputs import map_left, mapped, outputs_of
from lockstep.recorder.module_hooks import OUTPUT, Hook, ModuleHooks, after_other_hooks, matches
from lockstep.recorder.module_state import state_of
from lockstep.recorder.step import harmless
from lockstep.recorder.step_tensors import digest_of, generators, order_of
from lockstep.recorder.updates import Updates
from lockstep.recorder.whole_run import Loaders, WholeRun

STEPS = 2
EVERY_MODULE = "*"
# Tensors from lockstep.record.batch, for the next training call of the model
NOTED: dict[str, torch.Tensor] = {}


class Recorder(Updates):
    """Records what one rank's model computes, by hooks.

    After the last recorded step, only the samples of each call are hashed.

    `model` is the model itself, or one that is wrapped already: by DDP, FSDP2, torch.compile. `modules` is a
    pattern of the names of the modules whose outputs are recorded, such as "model.layers.0*". Raises
    UserError for FSDP1, whose flat parameters have no names, and for a model that cannot be built again.
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
        # Called when the model is called first
        self.when_complete: Callable[[], None] = lambda: None
        losses.WATCHING.append(self._see_loss)
        self.removing += [
            *(leaf.register_forward_pre_hook(Hook(self._see_leaf)).remove for leaf in leaves),
            patches.see_calls(torch.amp.GradScaler, "scale", self._see_scaling),
            patches.see_asking(),
            dropout_masks.see_dropout(self._records_dropout, self._see_dropout),
            patches.see_calls(torch.autograd, "backward", self._see_backward),
            functools.partial(losses.WATCHING.remove, self._see_loss),
            *self._see_updates(),
        ]
        # The value that a backward pass begins at
        self.root: float | None = None
        # The loop's losses that it has gone through so far, with their target classes
        self.arriving: list[tuple[dict[str, Any], torch.Tensor | None]] = []
        remove_earlier(self._rank_folder)

    def see_missed_step(self, arguments: tuple, options: dict[str, Any]) -> None:
        """Count the samples of a step that was over when the recording began.

        `arguments` and `options` are what the model was called with.
        """
        self.whole_run.see_call(self._arguments_by_name(arguments, options))
        self.whole_run.stepped = True

    def _see_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the recorded step anew, because a GradScaler has skipped it."""
        self.whole_run.see_overflow(optimizer)
        if self.removing:
            self.overflowed += 1
            self._begin()

    def _see_scaling(self, scaler: torch.amp.GradScaler, *_: object) -> None:
        # It is 1 if the scaler is not enabled.
        self.scale = scaler.get_scale()

    def _counts(self, number: int) -> bool:
        """Return whether a gradient that arrives now in micro batch `number` counts. Note how it came there.

        A gradient that torch.autograd.grad asked for counts, unless a backward pass comes, too.
        """
        about = self.micro[number]
        if patches.ASKED:
            is_of_batch = not torch.is_grad_enabled() and all(map(self._is_model_input, patches.ASKED[-1]))
            if self.stage is not None:
                # Zero-bubble schedules ask for the gradients of a stage's inputs, and later, from what they kept,
                # for those of its weights. All of it has arrived by then.
                about["reached"] |= is_of_batch
                return is_of_batch
            # A gradient with respect to what the model is called with is for a later batch, as in an attack,
            # unless it is differentiated in turn.
            about["elsewhere"] |= is_of_batch and not about["reached"]
            about["asked"] = not is_of_batch and (about["asked"] or not about["used"])
            return about["asked"]
        about["reached"] = True
        if about["asked"]:
            self.kept.forget(f"backward/{number}/")
            about.update(asked=False, scalars={})
        return True

    def _is_model_input(self, one: Any) -> bool:
        """Whether the model was called with this very tensor in the step."""
        model_input = self.given.get(id(one))
        return model_input is not None and model_input() is one

    def _is_training(self) -> bool:
        """Whether a call of the model now is for training.

        In evaluation mode, it is if the loop trains in this mode only.
        """
        return torch.is_grad_enabled() and (self.model.training or self.whole_run.in_evaluation)

    @harmless
    def _see_module(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the output of a module, or the gradient that arrives there."""
        direction, number, _ = name.split("/", 2)
        if direction == "forward" or self._counts(int(number)):
            self.kept.keep_shard(name, tensor, added=True)

    @torch.compiler.disable
    @harmless
    def _see_call(self, _module: torch.nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        """Begin a micro batch, if the loop calls the model for training.

        Write the step before, if it is over.
        """
        if self._is_internal_call():
            return
        if not self._is_training():
            # The batch is one of an evaluation.
            self.whole_run.loaders.source = None
            # The step before an evaluation is over.
            if self.optimizers and not self.updating:
                self._write()
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.give_up(
                "the model is called inside of torch.func, such as vmap, where tensors have no values yet"
            )
            return
        if self.stage is not None or (self.removing and not self.micro):
            stage = parallelism.stage()
            if stage is not None and self.stage is None:
                self._record_stages(stage)
            if stage is not None and stage.is_trial:
                return
        given = self._arguments_by_name(arguments, options)
        noted = dict(NOTED)
        NOTED.clear()
        # While an optimizer updates, its closure calls the model again.
        if not self.updating:
            self.whole_run.see_call(given)
        if not self.removing:
            return
        if not self.watches_engine:
            self.watches_engine = deepspeed_engine.watch(self)
        if self.updating:
            return
        # The step before is over: all its optimizers have stepped.
        if self.optimizers:
            self._write()
            if not self.removing:
                return
        if self.given_up_on:
            self.skipped += 1
            self._begin()
        # Not before now, so that these hooks come after those of libraries that wrap modules
        if self.hooks is None:
            self.hooks = ModuleHooks(self.model, self.modules, self._see_module, changed=self.hooked)
            self.removing.append(self.hooks.remove)
        # Until a GradScaler scales the loss
        self.scale = 1.0
        self._begin_micro_batch(given, noted)

    def _record_stages(self, stage: parallelism.Stage) -> None:
        """Record the stages of a pipeline that this rank has, each into a folder of its own: the model, and the others."""
        for earlier in self.folder.glob(f"stage_*/rank_{self.rank}"):
            remove_earlier(earlier)
        recorders = {stage.number: self}
        for number in stage.of_rank.keys() - {stage.number}:
            module = stage.of_rank[number]
            names = (wrapped.clean(name) for name, _ in module.named_modules())
            modules = self.modules if any(matches(name, self.modules) for name in names) else ""
            recorders[number] = Recorder(module, self.folder, self.steps, modules, self.whole_run.loaders)
            recorders[number].whole_run.in_evaluation = self.whole_run.in_evaluation
        for number, recorder in recorders.items():
            recorder.of_rank = [*recorders.values()]
            recorder.see_stage(stage._replace(number=number))
        # The last stage has the loss.
        see_loss = recorders[max(recorders)]._see_loss
        losses.WATCHING.remove(see_loss)
        losses.WATCHING.append(see_loss)

    def _begin_micro_batch(self, given: dict[str, Any], noted: dict[str, Any]) -> None:
        """Keep what a forward pass begins with: inputs, buffers, attributes, modes, states of generators.

        `given` is what the model is called with, by name. `noted` is what the loop gave lockstep.record.batch.
        """
        assert self.hooks is not None
        number = len(self.micro)
        if number == 0:
            self.when_complete()
            if self.writes_model and not self.surroundings:
                self.surroundings = surroundings.describe(self.model)
            named = wrapped.named_parameters(self.model)
            self.frozen = {name: digest_of(param) for name, param in named.items() if not param.requires_grad}
        # MODULE:ATTRIBUTE -> (JSON, the tensors in it)
        state = state_of(self.model).items()
        changed = {name: value for name, value in state if self.attributes.get(name) != value[0]}
        state_tensors = [pair for _, tensors in changed.values() for pair in tensors.items()]
        for name, buffer in [*self.model.named_buffers(), *state_tensors]:
            previous, self.buffers[name] = self.buffers.get(name), digest_of(buffer)
            if previous != self.buffers[name]:
                self.kept.keep_shard(f"buffer/{number}/{wrapped.clean(name)}", buffer)
        self.hooks.begin(number)
        about: dict[str, Any] = {
            "tensors": [],
            "plain": {},
            "left_out": [],
            # Whether the model is called before the last micro batch was trained on
            "together": number > 0 and not self.micro[-1]["used"],
            "asked": False,  # whether torch.autograd.grad alone asked for the gradient that arrived
            "used": False,  # whether a gradient arrives at what the model returns
            "reached": False,  # by a backward pass
            "elsewhere": False,  # whether it is in the loss of another model, such as a discriminator's
            "default_dtype": str(torch.get_default_dtype()),
            "differentiated": False,  # whether the loop has a gradient of the gradient that arrives
            "scalars": {},  # the gradients that arrive at scalars
            "losses": [],  # the losses that the loop computes
            "scale": 1.0,
            "autocast": None,
            "dropouts": 0,  # calls of dropout whose random numbers a CPU does not draw
            "policies": parallelism.policies(self.model),
            "orders": {},
            "attributes": {name: value for name, (value, _) in changed.items()},
            "evaluated": [
                wrapped.clean(name) for name, module in self.model.named_modules() if not module.training
            ],
        }
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self.given |= {id(tensor): weakref.ref(tensor) for tensor in tensors}
        self._keep_inputs(number, about, given, noted)
        self.micro.append(about)
        self.generators = generators()
        self.begun_at = torch.autograd._get_sequence_nr()
        self.random, self.frames = torch.get_rng_state(), parallelism.compiled_frames()

    def _keep_inputs(
        self, number: int, about: dict[str, Any], given: dict[str, Any], noted: dict[str, Any]
    ) -> None:
        """Keep the tensors and plain values of a call of the model.

        `about` is the entry of its micro batch, number `number`.
        """
        # Such as a named tuple: it is described as a whole.
        odd = {id(value) for value in given.values() if not _has_known_structure(value)}
        leaves, structure = tree_flatten_with_path(given, is_leaf=lambda value: id(value) in odd)
        inputs = {".".join(str(key).strip("[]'.") for key in path): value for path, value in leaves}
        about |= {"inputs": list(inputs), "structure": treespec_dumps(structure)}
        in_both = sorted(noted.keys() & inputs.keys())
        if in_both:
            raise UserError(
                f"lockstep.record.batch({in_both[0]}=...): the model is called with it, and it is recorded anyway; leave it out"
            )
        for name, value in {**inputs, **noted}.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self.kept.keep(f"batch/{number}/{name}", value)
                about["tensors"].append(name)
                order = order_of(value)
                about["orders"] |= {name: order} if order else {}
                if self.stage is not None and value.requires_grad:
                    self._see_gradient_once(f"backward/{number}/given.{name}", value)
            else:
                self._keep_value(number, about, name, value)

    def _see_gradient_once(self, name: str, tensor: torch.Tensor) -> None:
        """Keep the gradient that arrives at a tensor in this step. A pipeline receives into the same tensors in each step."""
        step = self.step

        def see(gradient: torch.Tensor) -> None:
            handle.remove()
            if self.step == step and self.removing:
                self._see_module(name, gradient)

        handle = tensor.register_hook(see)

    def _keep_value(self, number: int, about: dict[str, Any], name: str, value: Any) -> None:
        """Keep what a call of the model is given beside tensors: a number, a text, an object with its tensors."""
        describing = tree.Describing(self.model)
        try:
            about["plain"][name] = describing.value(value, name)
        except tree.Unnamed:
            about["left_out"].append(f"{name} is a {getattr(value, 'layout', type(value).__name__)}")
            return
        for place, tensor in describing.attributes.items():
            self.kept.keep(f"batch/{number}/{place}", tensor)
            about["tensors"].append(place)

    def _records_dropout(self) -> bool:
        return self.hooks is not None and self.hooks.inside and not being_recomputed()

    @harmless
    def _see_dropout(self, kept: Callable[[], torch.Tensor | None]) -> None:
        """Keep which elements a call of dropout kept; `kept` returns them, or None if that cannot be seen."""
        number, about = len(self.micro) - 1, self.micro[-1]
        mask = kept()
        if mask is not None:
            self.kept.keep(f"dropped/{number}/{about['dropouts']}", dropout_masks.packed(mask))
        about["dropouts"] += 1

    def _is_compiled(self) -> bool:
        """Whether torch.compile compiled the model or a part of it.

        It did if it has seen frames in a forward pass, or if hooks on all modules have seen nothing.
        """
        assert self.hooks is not None
        self.model_compiled |= parallelism.compiled_frames() > self.frames
        return self.model_compiled or bool(
            self.modules == EVERY_MODULE and self.hooks.handles and not self.hooks.seen
        )

    def _arguments_by_name(self, arguments: tuple, options: dict[str, Any]) -> dict[str, Any]:
        """Return what the model is called with, by the names of the parameters of its forward method."""
        given = self.signature.bind_partial(*arguments, **options).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given

    def _is_internal_call(self) -> bool:
        """Whether this call of the model is not one by which the loop gets what the model returns."""
        return being_recomputed() or self._calls_itself() or torch.jit.is_tracing()

    def _calls_itself(self) -> bool:
        """Whether the model is called inside of its own call, such as a loss that is its forward method, too."""
        owners = (owner for _, owner in callers(lambda code: code is torch.nn.Module._call_impl.__code__))
        return sum(owner is self.model for owner in owners) > 1

    def _see_leaf(self, _module: torch.nn.Module, _arguments: tuple) -> None:
        if self.micro and self.micro[-1]["autocast"] is None and not being_recomputed():
            self.micro[-1]["autocast"] = parallelism.autocast_of(self.model)

    @torch.compiler.disable
    @harmless
    def _see_output(self, _module: torch.nn.Module, _arguments: tuple, output: Any) -> Any:
        """Give the loop copies of what the model returns (lockstep/recorder/copies.py)."""
        is_training = self._is_training()
        is_over = is_training and not (self.removing and self.micro)
        if is_over or not torch.is_grad_enabled() or self._is_internal_call():
            return None
        loss, logits = outputs_of(output)
        if not is_training:
            self.whole_run.see_evaluation(logits if loss is None else loss)
            return None
        # A closure has called the model again.
        if self.updating:
            return None
        # Of the tensors that modules returned
        output_ids: set[int] = set()
        if self.hooks is not None:
            output_ids |= self.hooks.returned.keys()
            self.hooks.end()
        number, about = len(self.micro) - 1, self.micro[-1]
        if not torch.equal(self.random, torch.get_rng_state()):
            about.update(drawn=True, compiled=self._is_compiled())
            self.kept.keep(f"random/{number}", self.random)
        new = generators()
        about["generators"] = {name: old for name, old in self.generators.items() if old != new[name]}
        if loss is not None:
            about["loss_dtype"] = str(loss.dtype)
        if loss is not None and loss.requires_grad and logits is None:
            # The model returns its loss alone, so nothing else can be compared. The run may train on a part of it.
            about.update(loss=float(loss.detach()), used=True)

        # Ids of the copies: one that was put in a list which several modules have is met again.
        copies: set[int] = set()

        def watched(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in copies:
                return tensor
            value = float(tensor.detach()) if tensor is loss else None
            is_new = tensor.ndim and id(tensor) not in output_ids and ":" not in name
            # A stage hands it on, whatever modules returned it.
            if (is_new and fnmatchcase("returned", self.modules)) or (self.stage is not None and tensor.ndim):
                self._see_module(f"forward/{number}/returned.{name}", tensor)
            if not tensor.requires_grad:
                return tensor
            copy = copy_of(tensor, has_its_hooks=loss is not None and tensor is not loss)
            copies.add(id(copy))
            assert copy.grad_fn is not None
            self.returned_at = copy.grad_fn._sequence_nr()
            tensor_name = f"backward/{number}/returned.{name}"
            after_other_hooks(copy, functools.partial(self._see_returned_gradient, about, tensor_name, value))
            return copy

        returned = mapped(output, watched)
        map_left(self.model, watched, self.begun_at)
        return returned

    @harmless
    def _see_returned_gradient(
        self, about: dict[str, Any], tensor_name: str, loss: float | None, gradient: torch.Tensor | None
    ) -> None:
        """Keep the gradient that arrives from the loop at what the model returned.

        `about` is the entry of the micro batch. `loss` is the value of the tensor, if it is the model's own
        loss. The loop may leave that loss out. With DDP, `gradient` may then be None.
        """
        if gradient is None:
            return
        # Gradients are enabled only in a backward pass that makes a graph of itself.
        about["differentiated"] |= torch.is_grad_enabled()
        if not self._counts(int(tensor_name.split("/")[1])):
            return
        about.update(used=True, elsewhere=False, scale=self.scale)
        for seen, classes in self.arriving:
            about["losses"].append(seen)
            if classes is not None:
                self.kept.keep(f"target/{tensor_name.split('/')[1]}", classes)
        self.arriving = []
        self.arrived_since = True
        if loss is not None:
            about["loss"] = loss
        if gradient.ndim:
            self.kept.keep_shard(tensor_name, gradient, added=True)
        else:
            name = tensor_name.partition("/returned.")[2]
            about["scalars"][name] = about["scalars"].get(name, 0.0) + float(gradient)

    @harmless
    def _see_backward(self, roots: Any, *gradients: object) -> None:
        """Begin a backward pass. Put hooks on the parameters that the loop's own loss depends on directly.

        These are, for example, weights of its terms, or a head that the model does not call.
        """
        # A reentrant checkpoint goes backward inside of the backward pass.
        if being_recomputed():
            return
        # The loop may go backward through its loss once more.
        while self.beside:
            self.beside.pop().remove()
        if not self.micro or self.optimizers:
            return
        self.root, self.arriving = losses.value_of(roots, *gradients[:1]), []
        # With FSDP2, these are whole parameters, which are now in the places of their shards.
        names = {id(parameter): wrapped.clean(name) for name, parameter in self.model.named_parameters()}
        leaves, inside = reached_beside(roots, self.begun_at, self.returned_at)
        if inside:
            modules = (cast(dict[str, Any], node.metadata).get(OUTPUT) for node in inside)
            self.micro[-1]["around"] = next(filter(None, modules), "")
        for node, input_number, leaf in leaves:
            if id(leaf) in names:
                name = f"beside/{len(self.micro) - 1}/{names[id(leaf)]}"
                handle = node.register_hook(functools.partial(self._see_beside, name, input_number))
                self.beside.append(handle)

    @harmless
    def _see_loss(self, loss: losses.Loss, result: torch.Tensor) -> None:
        """Put a hook on the result of a loss function that the loop calls outside of the model."""
        is_outside = self.hooks is not None and not self.hooks.inside
        # Inside of torch.func, tensors have no values.
        has_value = torch._C._functorch.peek_interpreter_stack() is None
        if self.micro and is_outside and has_value and not being_recomputed():
            result.register_hook(functools.partial(self._see_loss_gradient, loss))

    @harmless
    def _see_loss_gradient(self, loss: losses.Loss, gradient: torch.Tensor) -> None:
        """Note a loss at which a gradient arrives.

        It is this model's if one arrives there, too, in the same backward pass.
        """
        self.arriving.append((loss.about(gradient, None if patches.ASKED else self.root), loss.classes()))

    @harmless
    def _see_beside(
        self, name: str, input_number: int, gradients: tuple[torch.Tensor | None, ...], _: object
    ) -> None:
        """Keep the gradient that the loop's own loss gives a parameter directly: that of a function's input."""
        gradient = gradients[input_number]
        if gradient is not None:
            self.kept.keep_shard(name, gradient, added=True)


def _has_known_structure(value: Any) -> bool:
    """Whether torch's pytree can write the classes of the containers in a value."""
    try:
        treespec_dumps(tree_structure(value))
    # TypeError: keys that JSON does not have
    except (NotImplementedError, TypeError):
        return False
    return True


@contextlib.contextmanager
def recording(
    model: torch.nn.Module, folder: str | Path, steps: int = STEPS, modules: str = EVERY_MODULE
) -> Iterator[Recorder]:
    """Record the first `steps` steps of the loop inside. An earlier recording in the folder is replaced."""
    recorder = Recorder(model, Path(folder), steps, modules)
    recorder.when_complete = divided_attributes.see_divisions()
    recorder.removing.append(losses.see_losses())
    try:
        yield recorder
    except Exception as error:
        recorder.see_error(error)
        raise
    finally:
        recorder.when_complete()
        recorder.stop()
