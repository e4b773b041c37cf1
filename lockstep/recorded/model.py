"""The recorded model, called again by one process with the micro batches that the run saw: in float64, or as the run computes."""

import contextlib
import functools
import inspect
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten, treespec_loads

from lockstep.dumps.trace import storage
from lockstep.ground.errors import UserError
from lockstep.inputs.weights import perturbed
from lockstep.recorded.streamed import Context, Streamed
from lockstep.recorder import building
from lockstep.recorder.called import Called
from lockstep.recorder.kept import generators, in_order, restore_generators
from lockstep.recorder.model_outputs import outputs_of, tensors_of
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recording import Recording
from lockstep.recorder.state import state_of
from lockstep.verdict import draws, gpu_arithmetic, gpu_kernels
from lockstep.verdict.computed import Passes
from lockstep.verdict.float64 import Float32, Float64, Place, Told, make_exact
from lockstep.verdict.lazy import Lazy, OnDisk
from lockstep.verdict.mean_over import in_rows

CROSS_ENTROPY = "cross_entropy()"  # where the model's code calls it


class Model(Passes):
    """As it was before each micro batch of a step. `exact`: in float64. `weights` are those before the step.

    `streamed`: memory has the weights of one unit of the model at a time (lockstep/recorded/streamed.py), and what modules return is on disk.
    """

    def __init__(
        self,
        recording: Recording,
        step: int,
        weights: Mapping[str, torch.Tensor],
        *,
        exact: bool,
        streamed: bool = False,
    ):
        self.streamed = streamed
        self.model, self.exact = recording.build(), exact
        self.kernels: list[str] = []
        self.in_tf32 = tf32_of(recording, self.model)
        super().__init__(self.model)
        self.recording, self.step, self.folder = recording, step, recording.folder
        self.weights = weights
        self.draw = 0
        if recording.origin.device != "cpu":  # whose random numbers a CPU does not draw
            self.kernels = gpu_kernels.choose(self.model)
        for module in self.model.modules():
            # Checkpointing would compute again outside of the mode
            if "gradient_checkpointing" in vars(module):
                vars(module).update(gradient_checkpointing=False)
        self.state = state_of(self.model)
        self.all_wide = {one.dtype for one in self.model.parameters()} == {torch.float64}
        own = Lazy(weights, self._own)
        units = Streamed(self.model, own, self._again) if streamed else None
        building.give(self.model, own if units is None else units.outside(self._computed_in))
        self.filled = {
            module: {key: one is not None for key, one in module._buffers.items()}
            for module in self.model.modules()
        }
        if exact:
            make_exact(self.model, _tables(self.model))
        frozen = set(recording.steps[step - 1][0].frozen)
        for name, parameter in self.model.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(name not in frozen)
        self.parameters = dict(self.model.named_parameters())
        # integer outputs of modules, as they were returned
        self.indices: dict[str, torch.Tensor] = {}
        self.mode = Told()
        self.widths: dict[int, int] = {}  # of all calls of topk
        # What a pass in the run's dtypes draws random numbers in, and finds tensors in, by rank and number of a micro batch
        self.dtypes: dict[tuple[int, int], dict[int | Place, torch.dtype]] = {}
        # Of a model that returns its loss alone: the module whose output are the logits, or CROSS_ENTROPY
        self.head = ""
        self.calls_of_topk: dict[str, int] | None = None  # by the output that has their indices

    def _own(self, name: str) -> torch.Tensor:
        """A weight as the model has it."""
        weight = self.weights[name]
        weight = weight.to(self._computed_in(weight.dtype), copy=True)
        if self.draw and self.parameters[name].requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.draw)
            lower = self.recording.steps[0][0].micro_batches[0].autocast
            # Autocast rounds what was moved once more.
            size = torch.finfo(dtype_of(lower)).eps / 4 if lower else torch.finfo(weight.dtype).eps / 2
            weight = perturbed(weight, generator, size)
        order = self.recording.steps[self.step - 1][0].orders.get(name)
        return in_order(weight, order) if order else weight

    def perturb(self, draw: int) -> None:
        """Give the model weights that are perturbed by one ulp, others with each number of a draw; 0: its own."""
        self.draw = draw
        if not self.streamed:  # else they are read when they are needed
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self._own(name))

    def _computed_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a weight that the run had in `dtype`. Of a run in float64, the yardstick is in float32: it must be above the run's errors."""
        if self.exact:
            return torch.float64
        cast = self.recording.steps[0][0].micro_batches[0].param_dtype
        return dtype_of(cast) if cast else torch.float32 if self.all_wide else dtype

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        super().keep(name, tensor)
        if not tensor.is_floating_point():
            self.indices[name] = tensor

    def _again(self) -> Context:
        """For a later computation of what is computed next: in the mode, and counted alike."""
        mode = self.mode
        before = Counter(self.hooks.calls), mode.calls, mode.draws, mode.dropouts, Counter(mode.reads)
        states = generators()

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            now = self.hooks.calls, mode.calls, mode.draws, mode.dropouts, mode.reads
            calls, *numbers, reads = before
            self.hooks.calls, mode.reads = Counter(calls), Counter(reads)
            mode.calls, mode.draws, mode.dropouts = numbers
            restore_generators(states)
            TorchFunctionMode.__enter__(mode)  # the default dtype is still the mode's
            try:
                with self._of_device():
                    yield
            finally:
                TorchFunctionMode.__exit__(mode, None, None, None)
                self.hooks.calls, mode.calls, mode.draws, mode.dropouts, mode.reads = now

        return again

    def logits(self, called: Called) -> torch.Tensor | None:
        """What the model returns for a micro batch that the run need not have seen; None without logits."""
        # Hooks keep what modules return where gradients are computed.
        with self._precision(called, self._mode(called, {})), torch.set_grad_enabled(bool(self.head)):
            output = self._forward(called)
            _, logits = outputs_of(output)
            if isinstance(output, list):  # perhaps chunks
                logits = called.whole_of(list(tensors_of(output).values()))
        if logits is None and self.head == CROSS_ENTROPY:
            return in_rows(called, self.mode.entropies or [])[2]
        return self.modules.get(f"forward/{called.number}/{self.head}") if logits is None else logits

    def outputs(self, called: Called, like: Called | None = None) -> Mapping[str, torch.Tensor]:
        """What modules return for a micro batch that the run need not have seen, as far as the model can be called with it.

        The model's buffers and attributes are as they were for `like`.
        """
        with contextlib.suppress(Exception), self._precision(called, self._mode(like or called, {})):
            for name, one in tensors_of(self._forward(called)).items():
                self.keep(f"forward/{called.number}/returned.{name}", one)
        return self.modules

    def unlike(self, one: Called, other: Called) -> list[str]:
        """The buffers, numbers and texts of the model that two micro batches do not have alike. Other attributes may be of the batch before."""
        mine, theirs = (self.recording.buffers(self.step, called) for called in (one, other))
        known = [name for name in mine.keys() & theirs.keys() if ":" not in name]
        buffers = [name for name in known if not torch.equal(mine[name], theirs[name])]
        here, there = one.about.attributes, other.about.attributes
        names = [
            name
            for name in here.keys() | there.keys()
            if here.get(name) != there.get(name)
            and not isinstance(here.get(name, there.get(name)), (dict, list))
        ]
        return sorted({name.replace(":", ".").removeprefix(".") for name in (*buffers, *names)})

    def _mode(self, called: Called, told: dict[str, torch.Tensor]) -> Told:
        # A pass may change one, such as a mean or a bias of experts
        self.buffers, self.changed = self.recording.buffers(self.step, called), called.about.attributes
        kind = Float64 if self.exact else Float32 if self.all_wide else Told
        if told and self.calls_of_topk is None:
            mode = self.mode = kind()
            with self._precision(called, mode), torch.no_grad():
                self._forward(called)
            found = {storage(indices): number for number, indices in mode.own.items()}
            self.calls_of_topk = {
                module_of(name): found[storage(tensor)]
                for name, tensor in self.indices.items()
                if storage(tensor) in found
            }
            self.widths = mode.widths
        calls = self.calls_of_topk or {}
        chosen = {calls[name]: tensor for name, tensor in told.items() if name in calls}
        self.mode = kind(chosen, self.widths)
        self.mode.dtypes = self.dtypes.setdefault((called.ranks[0], called.number), {})
        self.mode.entropies = [] if self.exact else None
        if self.recording.origin.device != "cpu":
            self.mode.kept_of = functools.partial(self.recording.dropped, self.step, called)
        return self.mode

    def _forward(self, called: Called) -> Any:
        """What the model returns."""
        if called.about.left_out:
            raise UserError(
                f"the model cannot be called again: {called.about.left_out[0]}; give it tensors, numbers, texts, or lists, tuples and dicts of them"
            )
        tensors = self._widened(called.tensors)
        tensors |= {name: in_order(tensors[name], order) for name, order in called.about.orders.items()}
        if called.about.param_dtype and called.about.casts_inputs and not self.exact:
            cast = dtype_of(called.about.param_dtype)
            tensors |= {name: one.to(cast) for name, one in tensors.items() if one.is_floating_point()}
        values = {**called.about.plain, **tensors}
        structure = treespec_loads(called.about.structure)
        given: dict[str, Any] = tree_unflatten([values[name] for name in called.about.inputs], structure)
        signature = inspect.signature(self.model.forward)
        known = signature.parameters
        given |= {name: one for name, one in {"use_cache": False, **called.instead}.items() if name in known}
        self._restore_state()
        for name, module in self.model.named_modules():
            module.training = name not in called.about.evaluated
        self.modules, self.indices = OnDisk(self.folder) if self.streamed else {}, {}
        self.hooks.begin(called.number)
        bound = inspect.BoundArguments(signature, {name: given.pop(name) for name in known if name in given})
        if called.random is not None:
            torch.set_rng_state(called.random)
        elif self.recording.origin.device == "cpu":
            # Nothing was drawn: a pass that draws is wrong, and is not to differ from the next one.
            torch.manual_seed(0)
        restore_generators(called.about.generators)
        self.called = called
        output = self.model(*bound.args, **bound.kwargs, **given)
        if self.mode.kept_of is not None and self.mode.dropouts != called.about.dropouts:
            raise draws.other_dropouts(self.mode.dropouts, called.about.dropouts)
        self.hooks.end()
        return output

    def _restore_state(self) -> None:
        """Buffers and attributes as they were before the micro batch."""
        tensors = {name: one for _, own in self.state.values() for name, one in own.items()}
        building.set_state(self.model, {name: value for name, (value, _) in self.state.items()}, tensors)
        buffers = self._widened(self.buffers)
        building.set_state(self.model, self.changed, buffers)
        for module, filled in self.filled.items():
            own = module._buffers.items()
            module._buffers = {key: one if filled[key] else None for key, one in own if key in filled}
        known = dict(self.model.named_buffers())
        for name, tensor in buffers.items():
            if name in known and known[name].shape == tensor.shape:
                known[name].detach().copy_(tensor)  # a forward pass may have asked for its gradient
            elif ":" not in name:
                place, _, key = name.rpartition(".")
                self.model.get_submodule(place)._buffers[key] = tensor.clone()

    def _widened(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is no weight and no id is in float64, too, or in float32 if the run computes in float64."""
        return tensors | {
            name: one.double() if self.exact else one.float() if self.all_wide else one
            for name, one in tensors.items()
            if one.is_floating_point()
        }

    @contextlib.contextmanager
    def _precision(self, called: Called, mode: Told) -> Iterator[None]:
        dtype = called.about.autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(mode)
            stack.enter_context(self._of_device())
            if dtype is not None and not self.exact:
                # Its cache would keep the weights of all units.
                stack.enter_context(torch.autocast("cpu", dtype_of(dtype), cache_enabled=not self.streamed))
            yield

    def _of_device(self) -> contextlib.AbstractContextManager[None]:
        """The arithmetic of the run's device, for a yardstick."""
        origin = self.recording.origin
        if self.exact or not origin.device.startswith("cuda"):
            return contextlib.nullcontext()
        return gpu_arithmetic.as_on_a_gpu(self.in_tf32, origin.versions["torch"])


def tf32_of(recording: Recording, model: torch.nn.Module) -> list[str]:
    """Which products of float32 the run's device may have computed in TF32, or as inexactly."""
    if not recording.origin.device.startswith("cuda") or all(
        one.dtype != torch.float32 for one in model.parameters()
    ):
        return []
    kinds = {type(one) for one in model.modules()}
    convolves = any(issubclass(kind, torch.nn.modules.conv._ConvNd) for kind in kinds)
    recurs = any(issubclass(kind, torch.nn.RNNBase) for kind in kinds)
    return [one for one in recording.origin.tf32 if convolves or one != "convolution"] + [
        "recurrent"
    ] * recurs


def dtype_of(name: str) -> torch.dtype:
    """Of torch.float32, as a recording has it."""
    return getattr(torch, name.removeprefix("torch."))


def _tables(model: torch.nn.Module) -> list[str]:
    """Modules without weights but with buffers, such as a rotary table: they stay as they are in the runs."""
    return [
        name
        for name, module in model.named_modules()
        if name and not list(module.children()) and not list(module.parameters()) and list(module.buffers())
    ]
