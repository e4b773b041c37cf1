"""Record what any training loop computes in its first steps, by hooks of torch alone.

    RUN/model.json                       the module tree (lockstep/dumps/tree.py), and how the run was made, by rank 0
    RUN/model.safetensors                its buffers, and attributes that are tensors
    RUN/rank_R/step_S.json               what rank R computed in step S: micro batches, optimizers, clipping, losses
    RUN/rank_R/run_N.json                what is kept of all steps (lockstep/dumps/whole_run.py)
    RUN/rank_R/step_S.safetensors        and its tensors; the shards as they are, each with its place in the whole

        batch/M/KEYWORD                  what the model was called with in micro batch M
        backward/M/returned.NAME         the gradient that arrives from the loop at a tensor that the model returns
        forward/M/MODULE, backward/M/MODULE            the output of a module, and the gradient that arrives at it
        buffer/M/NAME                    before micro batch M, if it is not what it was before an earlier one
        weight/NAME, gradient/NAME, updated/NAME       before the step, as the optimizer is given it, after the update
        state/KEY/NAME                   of the optimizer, before the step; of what it is afterwards, a hash

What a step begins with is not written again where it is, by its hash, what the step before ended with.

A step ends with the optimizer's. All ranks write for themselves; nothing is gathered, and nothing is communicated.
"""

import contextlib
import functools
import gc
import inspect
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten_with_path, treespec_dumps

from lockstep.dumps import deepspeed_engine, tree
from lockstep.dumps.hashes import digest
from lockstep.dumps.model_outputs import mapped, outputs_of
from lockstep.dumps.module_hooks import ModuleHooks
from lockstep.dumps.optimizers import PLAIN, kind_of, settings_of, state_of
from lockstep.dumps.plain_shards import PlainShards
from lockstep.dumps.whole_run import WholeRun
from lockstep.ground import origin
from lockstep.ground.blocks import blocks, pieces
from lockstep.ground.errors import UserError, first_line
from lockstep.ground.files import write_text
from lockstep.inputs.model import being_recomputed

FORMAT = 1
STEPS = 2
EVERY_MODULE = "*"
PIPELINES = ("torch.distributed.pipelining", ".runtime.pipe.", "pipeline_parallel")
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

    def __init__(self, model: torch.nn.Module, folder: Path, steps: int = STEPS, modules: str = EVERY_MODULE):
        self.model, self.folder, self.steps, self.modules = tree.inner(model), folder, steps, modules
        _require_recordable(self.model)
        self.tree, self.tensors = tree.describe(self.model)
        self.plain_shards = PlainShards(self.model)
        self.signature = inspect.signature(self.model.forward)
        self.step, self.given_up = 1, False
        self.watches_engine, self.engine_steps = False, False  # whose optimizers are none of torch's
        self.hooks: ModuleHooks | None = None
        self.last_digests: dict[str, int] = {}  # of what the step before ended with
        self.stepping: torch.optim.Optimizer | None = None
        self._begin()
        self.of_others: dict[int, bool] = {}  # optimizers by id: whether they are of another model
        self.whole_run = WholeRun(lambda: self._rank_folder, self._is_of_another_model)
        self.calls = self.model.register_forward_pre_hook(self._see_call, with_kwargs=True, prepend=True)
        self.outputs = self.model.register_forward_hook(self._see_output)
        self.removing: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
        ]
        # Wrappers may turn autocast on inside of the model's call only.
        leaves = [module for module in self.model.modules() if module._parameters and not module._modules]
        self.removing += [leaf.register_forward_pre_hook(self._see_leaf).remove for leaf in leaves]
        self._watch_clipping()
        self._watch_scaler()
        shutil.rmtree(self._rank_folder, ignore_errors=True)  # an earlier recording

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def _rank_folder(self) -> Path:
        return self.folder / f"rank_{self.rank}"

    def stop(self) -> None:
        """Write a step that is over, and remove the hooks."""
        if self.optimizers:
            self._write()
        if self.step == 1 and self.removing and not self.given_up:
            said = "no step was recorded: no optimizer made one, or a GradScaler skipped all of them"
            print(f"lockstep.record: {said} (rank {self.rank})", file=sys.stderr, flush=True)
        self._remove_hooks()
        self.calls.remove()
        self.outputs.remove()
        self.whole_run.close()

    def give_up(self, why: str) -> None:
        """End the recording; the training goes on."""
        self.given_up = True
        self._begin()
        with contextlib.suppress(Exception):  # such as a disk that is full
            self.stop()
        said = f"lockstep.record: the recording ended in step {self.step} on rank {self.rank} ({why}); the training goes on without it"
        print(said, file=sys.stderr, flush=True)

    def _remove_hooks(self) -> None:
        for remove in self.removing:
            remove()
        self.removing = []

    def _begin(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.places: dict[str, list[dict[str, Any]]] = {}
        self.digests: dict[str, int] = {}  # of what the step ends with
        self.unchanged: list[str] = []  # weights that the step before ended with
        self.changed: list[str] = []  # weights and state that it ended otherwise with
        self.micro: list[dict[str, Any]] = []
        self.frozen: list[str] = []
        self.clips: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.updating = False
        self.stepped: set[int] = set()
        self.buffers: dict[str, int] = {}
        self.arrived_since = True  # a gradient, after the last step of another model's optimizer

    def _watch_clipping(self) -> None:
        """torch.nn.utils.clip_grad_norm_ calls this function of its file, under whatever name it was imported itself."""
        module: Any = torch.nn.utils.clip_grad
        real = module._clip_grads_with_norm_

        def noted(
            parameters: Any, max_norm: float, total_norm: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            whole = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
            own = {id(one) for one in self.model.parameters()}
            if any(id(one) in own for one in parameters):  # else another model's
                self.see_clip(parameters, float(max_norm), float(whole))
            return real(parameters, max_norm, total_norm, *rest, **options)

        for place, name in ((module, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_")):
            setattr(place, name, noted)
            self.removing.append(functools.partial(setattr, place, name, real))

    def _watch_scaler(self) -> None:
        """A step that a GradScaler skips, as gradients are not finite, is none: what is recorded begins anew."""
        real = torch.amp.GradScaler.step

        def step(scaler: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
            others = bool(self.optimizers)
            returned = real(scaler, optimizer, *rest, **options)
            if not scaler.is_enabled():
                return returned
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            if not others and any(float(one) for one in found):
                self._begin()
            return returned

        setattr(torch.amp.GradScaler, "step", step)  # noqa: B010 - a method of a class of torch
        self.removing.append(functools.partial(setattr, torch.amp.GradScaler, "step", real))

    @_harmless
    def see_clip(self, parameters: list[torch.Tensor], max_norm: float, norm: float) -> None:
        given = {id(one) for one in parameters if one.grad is not None}
        own = tree.named_parameters(self.model)
        names = [name for name, one in own.items() if id(one) in given]
        about = {"max_norm": max_norm, "norm": norm, "after": len(self.micro)}
        clip = next((one for one in self.clips if one.items() >= about.items()), None)
        if clip is None:  # else parameters of several meshes, which are clipped in groups, by one norm
            clip = {**about, "parameters": []}
            self.clips.append(clip)
        clip["parameters"] += names
        clip["too_late"] = any(
            name in group["params"] for one in self.optimizers for group in one["groups"] for name in names
        )

    def keep(self, name: str, tensor: torch.Tensor, *, added: bool = False) -> None:
        """`added`: to what has arrived before."""
        copy = _copied(tensor)
        self.kept[name] = self.kept[name] + copy if added and name in self.kept else copy

    def keep_shard(
        self, name: str, tensor: torch.Tensor, *, added: bool = False, written: bool = True
    ) -> None:
        """This rank's blocks of a tensor, and where they lie in the whole. `written` is false for one that is written elsewhere."""
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            summed = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=summed)
        own = name.rpartition("/")[2]
        runs = self.plain_shards.runs(own, tensor)
        found = pieces(tensor.detach()) if runs is None else blocks(tensor.detach(), runs)
        full = tensor.shape if runs is None else self.plain_shards.shapes[own]
        places = []
        for number, (start, block) in enumerate(found):
            if written:
                self.keep(f"{name}#{number}", block, added=added)
            places.append({"start": list(start), "shape": list(block.shape)})
        self.places[name] = [{"full": list(full)}, *places]

    def keep_weight(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter before the step."""
        same = self._is_as_before(f"weight/{name}", tensor)
        if same:
            self.unchanged.append(f"weight/{name}")
        self.keep_shard(f"weight/{name}", tensor, written=not same)

    def keep_updated(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter after the update."""
        self.keep_shard(f"updated/{name}", tensor)
        self.digests[f"weight/{name}"] = _digest(tensor)

    def keep_state(self, name: str, tensor: torch.Tensor) -> None:
        """What an optimizer keeps of a parameter before the step; `name` is state/KEY/NAME."""
        self.keep_shard(name, tensor)
        self._is_as_before(name, tensor)

    def keep_updated_state(self, name: str, tensor: torch.Tensor) -> None:
        """The same after the update, of which a hash is kept."""
        self.digests[name] = _digest(tensor)

    def _is_as_before(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what the step before ended with; where it ended with another, that is noted."""
        before = self.last_digests.pop(name, None)
        same = before == _digest(tensor)
        if before is not None and not same:
            self.changed.append(name)
        return same

    @_harmless
    def _see_module(self, name: str, tensor: torch.Tensor) -> None:
        self.keep_shard(name, tensor, added=True)

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
            _require_no_pipeline()
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
        if self.hooks is None:  # only now: those that wrap a module have their hooks before these
            self.hooks = ModuleHooks(self.model, self.modules, self._see_module)
            self.removing.append(self.hooks.remove)
        number = len(self.micro)
        if number == 0:
            own = tree.named_parameters(self.model)
            self.frozen = [name for name, parameter in own.items() if not parameter.requires_grad]
        for name, buffer in self.model.named_buffers():
            last, self.buffers[name] = self.buffers.get(name), _digest(buffer)
            if last != self.buffers[name]:
                self.keep_shard(f"buffer/{number}/{tree.clean(name)}", buffer)
        self.hooks.begin(number)
        about: dict[str, Any] = {
            "tensors": [],
            "plain": {},
            "left_out": [],
            "together": number > 0
            and not self.micro[-1]["used"],  # called before the last one was trained on
            "used": False,  # whether a gradient arrives at what the model returns
            "elsewhere": False,  # in the loss of another model, such as a discriminator's
            "differentiated": False,  # whether the loop has a gradient of this gradient
            "scalars": {},  # those that arrive at scalars
            "autocast": None,
            "param_dtype": _param_dtype(self.model),
            "evaluated": [
                tree.clean(name) for name, module in self.model.named_modules() if not module.training
            ],
        }
        found, structure = tree_flatten_with_path(given)
        inputs = {".".join(str(key).strip("[]'.") for key in path): value for path, value in found}
        about |= {"inputs": list(inputs), "structure": treespec_dumps(structure)}
        twice = sorted(noted.keys() & inputs.keys())
        if twice:
            raise UserError(
                f"lockstep.record.batch({twice[0]}=...): the model is called with it, so it is recorded already"
            )
        for name, value in {**inputs, **noted}.items():
            if isinstance(value, torch.Tensor):
                self.keep(f"batch/{number}/{name}", value)
                about["tensors"].append(name)
            elif isinstance(value, PLAIN):
                about["plain"][name] = value
            else:
                about["left_out"].append(f"{name} is a {type(value).__name__}")
        self.micro.append(about)

    def _given(self, arguments: tuple, options: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with, by the names of its own parameters."""
        given = self.signature.bind_partial(*arguments, **options).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given

    def _see_leaf(self, _module: torch.nn.Module, _arguments: tuple) -> None:
        if self.micro and self.micro[-1]["autocast"] is None and not being_recomputed():
            self.micro[-1]["autocast"] = _autocast(self.model)

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
        if self.hooks is not None:
            self.hooks.end()
        number, about = len(self.micro) - 1, self.micro[-1]
        if loss is not None and loss.requires_grad and logits is None:
            # Nothing else can be held against the run, which may train on a part of the loss.
            about.update(loss=float(loss.detach()), used=True)

        def watched(name: str, tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.clone()  # which the loop may change in place
            value = float(tensor.detach()) if tensor is loss else None
            own.register_hook(
                functools.partial(self._arrives, about, f"backward/{number}/returned.{name}", value)
            )
            return own

        return mapped(output, watched)

    @_harmless
    def _arrives(
        self, about: dict[str, Any], place: str, loss: float | None, gradient: torch.Tensor | None
    ) -> None:
        """At what the model returned, from the loop. It may leave the model's own loss; DDP may then say that None arrives."""
        if gradient is None:
            return
        # Gradients are only enabled in a backward pass that makes a graph of itself.
        about.update(used=True, elsewhere=False, differentiated=torch.is_grad_enabled())
        self.arrived_since = True
        if loss is not None:
            about["loss"] = loss
        if gradient.ndim:
            self.keep_shard(place, gradient, added=True)
        else:
            name = place.partition("/returned.")[2]
            about["scalars"][name] = about["scalars"].get(name, 0.0) + float(gradient)

    @_harmless
    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple, options: dict[str, Any]
    ) -> Any:
        if self.stepping not in (None, optimizer):
            return None  # one inside of another, which holds all that this one does
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
        own = tree.named_parameters(self.model)
        names = {id(parameter): name for name, parameter in own.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self.optimizers and self._is_of_another_model(optimizer):
            for about in (
                self.micro
            ):  # unless a gradient arrives later, or is kept until the model's own optimizer steps
                about["elsewhere"] = True
            self.arrived_since = False
            return
        if not self.arrived_since:
            for about in self.micro:
                about["elsewhere"] = False
        self.updating = True
        final = [one for one in held if id(one) in names]  # another optimizer's may be clipped only later
        again = bool(final) and id(optimizer) in self.stepped
        self.stepped.add(id(optimizer))
        if not self.optimizers:
            final = list(own.values())
            for name, parameter in own.items():  # only now: FSDP2 has its shards in their places again
                self.keep_weight(name, parameter)
        scale = getattr(
            optimizer, "grad_scale", None
        )  # which a GradScaler leaves to an optimizer that is fused
        for parameter in final:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = gradient if scale is None else gradient / scale
                self.keep_shard(f"gradient/{names[id(parameter)]}", gradient)
        groups = [
            {**said, "params": [names.get(id(one)) for one in group["params"]]}
            for said, group in zip(settings_of(optimizer), optimizer.param_groups, strict=True)
        ]
        self.optimizers.append(
            {
                "class": kind_of(optimizer),
                "groups": groups,
                "strangers": sum(id(one) not in names for one in held),
                "replicas": [
                    [_digest(one), _digest(one.grad)]
                    for one in held
                    if id(one) not in names and type(one) is torch.nn.Parameter and one.grad is not None
                ],
                "again": again,
            }
        )
        for name, value in state_of(optimizer, names):
            self.keep_state(name, value)

    def _is_of_another_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds none of the model's parameters, and another one does. If none does, it may hold copies of them."""
        if id(optimizer) not in self.of_others:
            own = {id(parameter) for parameter in self.model.parameters()}
            holding = [
                one
                for one in gc.get_objects()
                if issubclass(type(one), torch.optim.Optimizer)
                and any(id(parameter) in own for group in one.param_groups for parameter in group["params"])
            ]
            self.of_others[id(optimizer)] = bool(holding) and all(one is not optimizer for one in holding)
        return self.of_others[id(optimizer)]

    @_harmless
    def _after_update(self, optimizer: torch.optim.Optimizer, _arguments: tuple, _options: dict) -> None:
        if optimizer is not self.stepping:
            return
        self.updating, self.stepping = False, None
        if not self.optimizers or self.engine_steps:
            return
        own = tree.named_parameters(self.model)
        for name, parameter in own.items():
            self.keep_updated(name, parameter)
        names = {id(parameter): name for name, parameter in own.items()}
        for name, value in state_of(optimizer, names):
            self.keep_updated_state(name, value)

    def _write(self) -> None:
        if self.rank == 0 and self.step == 1:
            write_model(self.folder, self.tree, self.tensors)
        self.changed += self.last_digests  # what is not there any more
        self._rank_folder.mkdir(parents=True, exist_ok=True)
        path = self._rank_folder / f"step_{self.step}.safetensors"
        save_file(self.kept, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        content = {
            "format": FORMAT,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "rank": self.rank,
            "step": self.step,
            "torch": torch.__version__,
            "data_parallel": _data_parallel(self.model),
            "groups": _groups(),
            "frozen": self.frozen,
            "micro_batches": self.micro,
            "clips": self.clips,
            "optimizers": self.optimizers,
            "places": self.places,
            "unchanged": self.unchanged,
            "changed": self.changed,
        }
        write_text(path.with_suffix(".json"), json.dumps(content))
        self.step += 1
        self.last_digests = self.digests
        self._begin()
        if self.step > self.steps:
            self._remove_hooks()
            self.plain_shards.places.clear()  # a hash for each row and column of every parameter
            self.whole_run.write()  # a script may end without a word


def write_model(folder: Path, about: tree.TREE, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        name: _copied(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in tensors.items()
    }
    save_file(whole, folder / "model.safetensors")
    content = {"format": FORMAT, "tree": about, "origin": origin.of_run()}
    write_text(folder / "model.json", json.dumps(content))


def _digest(tensor: torch.Tensor) -> int:
    return digest(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


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


def _require_recordable(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UserError(
                f"{name or 'the model'} is wrapped by FSDP1, whose flat parameters have no names of their own; use fully_shard (FSDP2)"
            )


def _require_no_pipeline() -> None:
    """Libraries of pipelines call a model that is a stage alone."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_globals.get("__name__", "")
        if any(word in caller for word in PIPELINES):
            raise UserError(
                f"the model is a stage of a pipeline, called by {caller}, and no reference can compute a stage alone; record a run without pipeline parallelism"
            )
        frame = frame.f_back


def _autocast(model: torch.nn.Module) -> str | None:
    """The dtype of autocast on the model's device, or None."""
    device = next(model.parameters()).device.type
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _param_dtype(model: torch.nn.Module) -> str | None:
    """The dtype that FSDP2 gives parameters for the forward and the backward pass, or None."""
    if not isinstance(model, FSDPModule):
        return None  # the parameters' own
    dtype = model._get_fsdp_state()._mp_policy.param_dtype
    return None if dtype is None else str(dtype)


def _groups() -> list[list[int]]:
    """The ranks of each process group that this rank is in, in their order there."""
    groups = dist.distributed_c10d._world.pg_group_ranks.values() if dist.is_initialized() else ()
    return [sorted(ranks, key=lambda rank: ranks[rank]) for ranks in groups]


def _data_parallel(model: torch.nn.Module) -> list[int]:
    """The ranks that FSDP2 divides the samples among, as far as this rank knows; empty without it."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return sorted(
        {rank for group in groups if group for rank in group.mesh_info.mesh.mesh.flatten().tolist()}
    )
