"""Record what any training loop computes in its first steps, by hooks of torch alone.

    RUN/model.json                       the module tree (lockstep/dumps/tree.py), and how the run was made, by rank 0
    RUN/model.safetensors                its buffers, and attributes that are tensors
    RUN/rank_R/step_S.json               what rank R computed in step S: micro batches, optimizers, clipping, losses
    RUN/rank_R/run_N.json                what is kept of all steps (lockstep/dumps/whole_run.py)
    RUN/rank_R/step_S.safetensors        and its tensors; the shards as they are, each with its place in the whole

        batch/M/KEYWORD                  what the model was called with in micro batch M
        forward/M/returned.NAME          a tensor that the model returns, and none of its modules did
        backward/M/returned.NAME         the gradient that arrives from the loop at a tensor that the model returns
        beside/M/NAME                    the part of a parameter's gradient that the loop's own loss gives it, not by way of what the model returns
        forward/M/MODULE, backward/M/MODULE            the output of a module, and the gradient that arrives at it
        buffer/M/NAME                    before micro batch M, if it is not what it was before an earlier one; MODULE:ATTRIBUTE for one that is no buffer
        random/M                         the state of torch's generator then, if the model drew from it; those of Python and numpy are in the JSON
        weight/NAME, gradient/NAME, updated/NAME       before the step, as the optimizer is given it, after the update
        state/KEY/NAME, attribute/KEY/NUMBER           of the optimizer, before the step; of what it is afterwards, a hash

What a step begins with is not written again where it is, by its hash, what the step before ended with.

A step ends with the optimizer's. All ranks write for themselves; nothing is gathered, and nothing is communicated.
"""

import contextlib
import functools
import gc
import inspect
import json
import math
import os
import shutil
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, treespec_dumps

from lockstep.dumps import deepspeed_engine, parallelism, patches, tree, wrapped
from lockstep.dumps.kept import Kept, copied, digest_of, generators
from lockstep.dumps.model_outputs import map_left, mapped, outputs_of
from lockstep.dumps.module_hooks import Hook, ModuleHooks, after_other_hooks
from lockstep.dumps.optimizers import PLAIN, described
from lockstep.dumps.plain_shards import PlainShards
from lockstep.dumps.recorded_step import FORMAT
from lockstep.dumps.whole_run import Loaders, WholeRun
from lockstep.ground import origin
from lockstep.ground.errors import UserError, first_line
from lockstep.ground.files import write_text
from lockstep.inputs.model import being_recomputed

STEPS = 2
ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"
EVERY_MODULE = "*"
NOTED: dict[str, torch.Tensor] = {}  # by lockstep.record.batch, for the next training call of the model


def _harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a recorder that does not end the training that it watches, but the recording. A usage error ends both."""

    @functools.wraps(hook)
    def call(recorder: "Recorder", *arguments: Any, **options: Any) -> Any:
        if recorder.given_up:
            return None
        try:
            return hook(recorder, *arguments, **options)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - of whatever a model returns, an optimizer holds, a disk has no room for
            traceback.print_exc()
            recorder.give_up(f"{type(error).__name__}: {first_line(error)}")
            return None

    return call


class Recorder:
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
        self.model, self.folder, self.steps, self.modules = wrapped.inner(model), folder, steps, modules
        parallelism.require_recordable(self.model)
        self.tree, self.tensors = tree.describe(self.model)
        self.plain_shards = PlainShards(self.model)
        self.attributes = {name: value for name, (value, _) in tree.state_of(self.model).items()}
        self.signature = inspect.signature(self.model.forward)
        self.step, self.given_up = 1, False
        self.ranks: dict[str, Any] = {}  # of the last step: this rank, and who the others are
        self.compiled, self.model_compiled = False, False
        self.watches_engine, self.engine_steps = False, False  # whose optimizers are none of torch's
        self.hooks: ModuleHooks | None = None
        self.returned_at = 0  # the number of the function that made the last copy of what the model returns
        self.beside: list[Any] = []  # handles of hooks on the loop's own loss
        self.hooked: set[str] = set()  # modules that return what a hook made of their output
        self.last_digests: dict[str, int] = {}  # of what the step before ended with
        self.stepping: torch.optim.Optimizer | None = None
        self.nested = 0
        self.last_hooks: dict[int, Callable[[], None]] = {}  # by optimizer, while it steps
        self.skipped = 0  # windows of micro batches before this step
        self._begin()
        self.of_others: dict[int, bool] = {}  # optimizers by id: whether they are of another model
        self.whole_run = WholeRun(lambda: self._rank_folder, self._is_of_another_model, loaders)
        call = Hook(self._see_call)
        self.calls = self.model.register_forward_pre_hook(call, with_kwargs=True, prepend=True)
        self.outputs = self.model.register_forward_hook(Hook(self._see_output))
        self.removing: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
        ]
        # Wrappers may turn autocast on inside of the model's call only.
        leaves = [module for module in self.model.modules() if module._parameters and not module._modules]
        self.removing += [leaf.register_forward_pre_hook(Hook(self._see_leaf)).remove for leaf in leaves]
        self.removing += patches.see_clipping(self.model, self.see_clip)
        self.removing += patches.see_value_clipping(self.see_value_clip)
        self.removing.append(patches.see_calls(torch.amp.GradScaler, "scale", self._see_scaling))
        # What is recorded of a step that is skipped begins anew.
        self.removing.append(patches.see_skipped_steps(lambda: bool(self.optimizers), self._begin))
        self.removing.append(patches.see_calls(torch.optim.Optimizer, "zero_grad", self._see_zeroing))
        self.removing += patches.see_reductions(self._see_reduction)
        self.removing.append(patches.see_asking())
        self.removing.append(patches.see_calls(torch.autograd, "backward", self._see_backward))
        shutil.rmtree(self._rank_folder, ignore_errors=True)  # an earlier recording

    @property
    def rank(self) -> int:
        if dist.is_initialized():
            return dist.get_rank()
        return self.ranks.get("rank", int(os.environ.get("RANK", "0")))

    def _see_ranks(self) -> None:
        """A loop may destroy its process group before its last step is written."""
        if dist.is_initialized() or not self.ranks:
            self.ranks = {
                "world_size": dist.get_world_size() if dist.is_initialized() else 1,
                "rank": self.rank,
                "data_parallel": parallelism.data_parallel(self.model),
                "groups": parallelism.groups(),
            }

    @property
    def _rank_folder(self) -> Path:
        return self.folder / f"rank_{self.rank}"

    def stop(self) -> None:
        """Write a step that is over, and remove the hooks."""
        if self.optimizers:
            self._write()
        if self.step == 1 and self.removing and not self.given_up:
            others = any(self.of_others.values())
            said = "the optimizers that stepped hold none of the recorded model's parameters" * others
            said = f"no step was recorded: {said or 'no optimizer made one, or a GradScaler skipped all of them'}"
            print(f"lockstep.record: {said} (rank {self.rank})", file=sys.stderr, flush=True)
        self._remove_hooks()
        self.calls.remove()
        self.outputs.remove()
        self.whole_run.close()

    def discard(self) -> None:
        """End the recording, and leave out the step that has begun."""
        self.given_up = True
        self._begin()
        with contextlib.suppress(Exception):  # such as a disk that is full
            self.stop()

    def give_up(self, why: str) -> None:
        """The same where something went wrong; the training goes on."""
        self.discard()
        said = f"lockstep.record: the recording ended in step {self.step} on rank {self.rank} ({why}); the training goes on without it"
        print(said, file=sys.stderr, flush=True)

    def _remove_hooks(self) -> None:
        for remove in self.removing:
            remove()
        self.removing = []

    def _begin(self) -> None:
        self.kept = Kept(self.plain_shards, self.last_digests)
        self.micro: list[dict[str, Any]] = []
        # What the model was called with, by id; not kept alive, as a graph may hang on it
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        self.frozen: dict[str, int] = {}  # hashes of what requires no gradient, before the first micro batch
        self.clips: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.updating = False
        self.given_up_on = False  # whether a window was clipped, and then set to zero
        self.channels_last: list[str] = []  # parameters
        self.elsewhere = 0  # tensors that optimizers of other models hold
        self.reduced = 0  # elements that were given to collectives that reduce
        self.stepped: set[int] = set()
        self.buffers: dict[str, int] = {}
        self.before_zeroing: dict[
            int, list[int]
        ] = {}  # by the first parameter: micro batches at which a gradient had arrived
        self.arrived_since = True  # a gradient, after the last step of another model's optimizer

    @_harmless
    def see_clip(self, parameters: list[torch.Tensor], max_norm: float, norm: float, factor: float) -> None:
        own = self._among(parameters)
        names = [name for name, one in own.items() if one.grad is not None]
        of_model = {id(one) for one in own.values()}
        others = [one.grad for one in parameters if id(one) not in of_model and one.grad is not None]
        beside = torch.nn.utils.get_total_norm(others)
        beside = beside.full_tensor() if isinstance(beside, DTensor) else beside
        about = {"max_norm": max_norm, "norm": norm, "factor": factor, "after": len(self.micro)}
        clip = next((one for one in self.clips if one.items() >= about.items()), None)
        if clip is None:  # else parameters of several meshes, which are clipped in groups, by one norm
            clip = {**about, "parameters": [], "beside": 0.0}
            self.clips.append(clip)
        clip["beside"] = math.hypot(clip["beside"], beside)
        clip["parameters"] += names
        # An optimizer in the backward pass has set gradients to None.
        clip["too_late"] = self._have_stepped(names or list(own))

    @_harmless
    def see_value_clip(self, parameters: list[torch.Tensor], bound: float) -> None:
        own = {name: one.grad for name, one in self._among(parameters).items() if one.grad is not None}
        for name, gradient in own.items():
            if f"unclipped/{name}" not in self.kept.places:
                self.kept.keep_shard(f"unclipped/{name}", gradient)
        if own:
            about = {"max_norm": bound, "norm": 0.0, "factor": 1.0, "by_value": True, "parameters": list(own)}
            about |= {"after": len(self.micro), "too_late": self._have_stepped(list(own))}
            self.clips.append(about)

    def _among(self, given: list[torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """The model's parameters among these, by name."""
        places = {id(one) for one in given}
        return {name: one for name, one in wrapped.named_parameters(self.model).items() if id(one) in places}

    def _have_stepped(self, names: list[str]) -> bool:
        """Whether the optimizer of any of these parameters has stepped."""
        held = (group["params"] for one in self.optimizers for group in one["groups"])
        return any(name in params for params in held for name in names)

    def _see_zeroing(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A loop may skip a step whose norm is too large."""
        self.before_zeroing[_first(optimizer)] = [
            number for number, about in enumerate(self.micro) if about["used"]
        ]
        complete = bool(self.clips) and not self.optimizers
        self.given_up_on |= complete and not self._is_of_another_model(optimizer)

    def _see_scaling(self, scaler: torch.amp.GradScaler, *_: object) -> None:
        self.scale = scaler.get_scale()  # 1 if it is not enabled

    def _see_reduction(self, number: int) -> None:
        self.reduced += number

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

    @_harmless
    def _see_module(self, name: str, tensor: torch.Tensor) -> None:
        which, number, _ = name.split("/", 2)
        if which == "forward" or self._counts(int(number)):
            self.kept.keep_shard(name, tensor, added=True)

    @torch.compiler.disable
    @_harmless
    def _see_call(self, _module: torch.nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        if being_recomputed():
            return
        if not (self.model.training and torch.is_grad_enabled()):
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
            own = wrapped.named_parameters(self.model)
            self.frozen = {name: digest_of(one) for name, one in own.items() if not one.requires_grad}
        state = tree.state_of(self.model).items()
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
            "scale": 1.0,
            "autocast": None,
            **parallelism.dtypes_of(self.model),
            "channels_last": [],
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
        self.random, self.frames = torch.get_rng_state(), parallelism.compiled_frames()

    def _keep_inputs(
        self, number: int, about: dict[str, Any], given: dict[str, Any], noted: dict[str, Any]
    ) -> None:
        found, structure = tree_flatten_with_path(given)
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
                about["channels_last"] += [name] * _is_channels_last(value)
            elif isinstance(value, PLAIN):
                about["plain"][name] = value
            else:
                about["left_out"].append(f"{name} is a {getattr(value, 'layout', type(value).__name__)}")

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

    def _see_leaf(self, _module: torch.nn.Module, _arguments: tuple) -> None:
        if self.micro and self.micro[-1]["autocast"] is None and not being_recomputed():
            self.micro[-1]["autocast"] = parallelism.autocast_of(self.model)

    @torch.compiler.disable
    @_harmless
    def _see_output(self, _module: torch.nn.Module, _arguments: tuple, output: Any) -> Any:
        """Gives the loop copies of what the model returns: at them, only what the loop itself makes of each arrives, not what the model does."""
        over = self.model.training and not (self.removing and self.micro)
        if over or not torch.is_grad_enabled() or being_recomputed():
            return None
        loss, logits = outputs_of(output)
        if not self.model.training:
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
            own = tensor.clone()  # which the loop may change in place
            copies.add(id(own))
            assert own.grad_fn is not None
            own.grad_fn.metadata[patches.COPY] = True  # type: ignore[index] # a property to mypy
            self.returned_at = own.grad_fn._sequence_nr()
            place = f"backward/{number}/returned.{name}"
            after_other_hooks(own, functools.partial(self._arrives, about, place, value))
            return own

        returned = mapped(output, watched)
        map_left(self.model, watched)
        return returned

    @_harmless
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
        self.arrived_since = True
        if loss is not None:
            about["loss"] = loss
        if gradient.ndim:
            self.kept.keep_shard(place, gradient, added=True)
        else:
            name = place.partition("/returned.")[2]
            about["scalars"][name] = about["scalars"].get(name, 0.0) + float(gradient)

    @_harmless
    def _see_backward(self, roots: Any, *_: object) -> None:
        """A loss of the loop's own may depend on parameters themselves, such as weights of its terms, or a head that the model does not call."""
        while self.beside:  # the loop may go through its loss once more
            self.beside.pop().remove()
        if not self.micro or self.optimizers:
            return
        names = {id(one): name for name, one in wrapped.named_parameters(self.model).items()}
        for node, place, leaf in patches.leaves_beside(roots, self.returned_at):
            if id(leaf) in names:
                name = f"beside/{len(self.micro) - 1}/{names[id(leaf)]}"
                handle = node.register_hook(functools.partial(self._see_beside, name, place))
                self.beside.append(handle)

    @_harmless
    def _see_beside(
        self, name: str, place: int, gradients: tuple[torch.Tensor | None, ...], _: object
    ) -> None:
        gradient = gradients[place]
        if gradient is not None:
            self.kept.keep_shard(name, gradient, added=True)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> Any:
        self.compiled = torch.compiler.is_compiling()  # the optimizer's step
        if self.compiled:
            return self._begin_update(optimizer, arguments, options)
        # After the optimizer's own hooks, which may reduce gradients: those of all optimizers come first.
        self._remove_last_hook(optimizer)
        self.last_hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._begin_update).remove
        return None

    def _remove_last_hook(self, optimizer: torch.optim.Optimizer) -> None:
        self.last_hooks.pop(id(optimizer), lambda: None)()

    @torch.compiler.disable
    @_harmless
    def _begin_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> Any:
        if self.stepping not in (None, optimizer):
            return None  # one inside of another, which holds all that this one does
        if type(optimizer).__module__ == ZERO_REDUNDANCY:
            return None  # the one inside has this rank's share, which is then sent to the others
        self.nested += self.stepping is optimizer  # it calls the step of the class that it is derived from
        if self.nested:
            return None
        self.stepping = optimizer
        # The first argument is the optimizer itself.
        closure = options.get("closure") or next((one for one in arguments[1:] if callable(one)), None)
        if closure is None:
            self._see_gradients(optimizer)
            return None

        @functools.wraps(closure)
        def then_seen() -> Any:  # the gradients are final after the closure
            loss = closure()
            if not self.updating:  # L-BFGS calls it again, with other weights
                self._see_gradients(optimizer)
            return loss

        if "closure" in options:
            return arguments, {**options, "closure": then_seen}
        return tuple(then_seen if one is closure else one for one in arguments), options

    @_harmless
    def _see_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.micro or self.engine_steps:
            return
        self._see_ranks()
        own = wrapped.named_parameters(self.model)
        names = {id(parameter): name for name, parameter in own.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self.optimizers and self._is_of_another_model(optimizer):
            # Unless a gradient arrives later, or is kept until the model's own optimizer steps. What arrived before this one's
            # gradients were set to zero was not for it.
            known = self.before_zeroing.get(_first(optimizer), ())
            for number, about in enumerate(self.micro):
                about["elsewhere"] |= number not in known
            self.arrived_since = False
            self.elsewhere += len(held)
            return
        if not self.arrived_since:
            for about in self.micro:
                about["elsewhere"] = False
        # A forward pass may have unfrozen some.
        trained = {name for name in self.frozen if own[name].requires_grad and own[name].grad is not None}
        self.frozen = {name: was for name, was in self.frozen.items() if name not in trained}
        changed = next((name for name, was in self.frozen.items() if digest_of(own[name]) != was), None)
        if changed is not None:
            self.give_up(f"{changed} requires no gradient, and is not what it was when the step began")
            return
        self.updating = True
        final = [one for one in held if id(one) in names]  # another optimizer's may be clipped only later
        again = bool(final) and id(optimizer) in self.stepped
        self.stepped.add(id(optimizer))
        if not self.optimizers:
            final = list(own.values())
            for name, parameter in own.items():  # only now: FSDP2 has its shards in their places again
                self.kept.keep_weight(name, parameter)
                self.channels_last += [name] * _is_channels_last(parameter)
        scale = getattr(
            optimizer, "grad_scale", None
        )  # which a GradScaler leaves to an optimizer that is fused
        for parameter in final:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = gradient if scale is None else gradient / scale
                self.kept.keep_shard(f"gradient/{names[id(parameter)]}", gradient)
        said, tensors = described(optimizer, self.model, len(self.optimizers))
        self.optimizers.append(
            {
                **said,
                "strangers": sum(id(one) not in names for one in held),
                "replicas": [
                    [digest_of(one), digest_of(one.grad)]
                    for one in held
                    if id(one) not in names and type(one) is torch.nn.Parameter and one.grad is not None
                ],
                "again": again,
                "compiled": self.compiled,
            }
        )
        for name, value in tensors.items():
            self.kept.keep_state(name, value)

    def _is_of_another_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds none of the model's parameters, and another one does. If none does, it may hold copies of them."""
        if id(optimizer) not in self.of_others:
            own = {id(parameter) for parameter in wrapped.named_parameters(self.model).values()}
            holding = [
                one
                for one in gc.get_objects()
                if issubclass(type(one), torch.optim.Optimizer)
                and any(id(parameter) in own for group in one.param_groups for parameter in group["params"])
            ]
            self.of_others[id(optimizer)] = bool(holding) and all(one is not optimizer for one in holding)
        return self.of_others[id(optimizer)]

    @torch.compiler.disable
    @_harmless
    def _after_update(self, optimizer: torch.optim.Optimizer, _arguments: tuple, _options: dict) -> None:
        self._remove_last_hook(optimizer)
        if optimizer is not self.stepping:
            return
        if self.nested:
            self.nested -= 1
            return
        self.updating, self.stepping = False, None
        if not self.optimizers or self.engine_steps:
            return
        own = wrapped.named_parameters(self.model)
        for name, parameter in own.items():
            self.kept.keep_updated(name, parameter)
        number = len(self.optimizers) - 1
        for name, value in described(optimizer, self.model, number)[1].items():
            self.kept.keep_updated_state(name, value)

    def _write(self) -> None:
        self._see_ranks()
        for number, about in enumerate(self.micro):
            # A model that returns its loss alone was taken for one that is trained on it.
            seen = any(place.startswith(f"forward/{number}/") for place in self.kept.places)
            about["used"] &= about["reached"] or about["asked"] or not seen
        if self.rank == 0 and self.step == 1:
            made = {
                "device": str(next(self.model.parameters()).device),
                "seed": str(torch.initial_seed()),
                "tf32": parallelism.tf32(),
            }
            write_model(self.folder, self.tree, self.tensors, made)
        self._rank_folder.mkdir(parents=True, exist_ok=True)
        path = self._rank_folder / f"step_{self.step}.safetensors"
        save_file(self.kept.tensors, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        content = {
            "format": FORMAT,
            **self.ranks,
            "step": self.step,
            "torch": torch.__version__,
            "frozen": list(self.frozen),
            "attributes": self.attributes,
            "micro_batches": self.micro,
            "clips": self.clips,
            "optimizers": self.optimizers,
            "reduced": self.reduced,
            "skipped": self.skipped,
            "of_others": self.elsewhere,
            "channels_last": self.channels_last,
            "hooked": sorted(self.hooked),
            "hooked_parameters": [
                name for name, one in wrapped.named_parameters(self.model).items() if one._backward_hooks
            ],
            "places": self.kept.places,
            "unchanged": self.kept.unchanged,
            # And what is not there any more
            "changed": [*self.kept.changed, *self.last_digests],
        }
        write_text(path.with_suffix(".json"), json.dumps(content))
        self.step += 1
        self.skipped = 0
        self.last_digests = self.kept.digests
        self._begin()
        if self.step > self.steps:
            self._remove_hooks()
            self.plain_shards.places.clear()  # a hash for each row and column of every parameter
            self.whole_run.write()  # a script may end without a word


def write_model(
    folder: Path, about: tree.TREE, tensors: dict[str, torch.Tensor], made: dict[str, Any]
) -> None:
    """`made` says how, besides what lockstep/ground/origin.py knows."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        name: copied(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in tensors.items()
    }
    save_file(whole, folder / "model.safetensors")
    content = {"format": FORMAT, "tree": about, "origin": origin.of_run() | made}
    write_text(folder / "model.json", json.dumps(content))


def _first(optimizer: torch.optim.Optimizer) -> int:
    """The id of its first parameter: that of a wrapper, too."""
    return next((id(one) for group in optimizer.param_groups for one in group["params"]), 0)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether its channels lie beside each other in memory, which convolutions are then computed otherwise for."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    return order is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=order)


@contextlib.contextmanager
def recording(
    model: torch.nn.Module, folder: str | Path, steps: int = STEPS, modules: str = EVERY_MODULE
) -> Iterator[Recorder]:
    """Record the first `steps` steps of the loop inside. An earlier recording in the folder is replaced."""
    recorder = Recorder(model, Path(folder), steps, modules)
    try:
        yield recorder
    finally:
        recorder.stop()
