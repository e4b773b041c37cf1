"""Call the recorded model again, by one process, with the micro batches that the run saw: in float64, or as the run computes."""

import contextlib
import functools
import inspect
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_unflatten, treespec_loads

from lockstep.dumps.trace import storage
from lockstep.ground.errors import UserError
from lockstep.inputs.weights import perturbed
from lockstep.recorded.own_loss import Loss
from lockstep.recorded.streamed import Context, Streamed
from lockstep.recorder import building
from lockstep.recorder.complex_numbers import as_real, in_width, is_inexact, like
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.model_outputs import outputs_of, tensors_of
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.module_state import state_of
from lockstep.recorder.recorded_step import Policy
from lockstep.recorder.recording import Recording
from lockstep.recorder.step_tensors import generators, in_order, restore_generators
from lockstep.verdict import draws, gpu_arithmetic, gpu_kernels
from lockstep.verdict.computed import Passes
from lockstep.verdict.float64 import Float32, Float64, Place, Told, default_dtype, make_exact
from lockstep.verdict.lazy import Lazy, OnDisk
from lockstep.verdict.mean_over import in_rows

# The head of a model whose code calls cross_entropy itself
CROSS_ENTROPY = "cross_entropy()"


class GradientsOnDisk:
    """Keeps the gradients of parameters on disk, so that memory has only the one that has just arrived.

    The hooks of a model refer to this object. They must not refer to the model itself: Python would never
    free it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """Begin a micro batch."""
        self.kept, self.are_finite = OnDisk(self.folder), True

    def arrive(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.add(name, parameter.grad)
        parameter.grad = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        earlier = self.kept.get(name)
        tensor = as_real(tensor)
        self.kept[name] = gradient = tensor.to_dense() if earlier is None else earlier + tensor
        # A sum is not finite if one of its terms is not. It takes a tenth of the time of looking at each.
        self.are_finite = self.are_finite and bool(gradient.sum(dtype=torch.float64).isfinite())

    def take(self) -> OnDisk:
        """Return the gradients that have arrived since `begin`, or since they were taken last."""
        taken, self.kept = self.kept, OnDisk(self.folder)
        taken.close()
        return taken


class Model(Passes):
    """The recorded model as it was before each micro batch of a step. `weights` are those before the step.

    `exact`: it computes in float64, for the reference; else as the run does, for the yardstick. `streamed`: memory has the weights of one
    unit of the model at a time (lockstep/recorded/streamed.py), and what modules return is on disk.
    """

    def __init__(
        self,
        recording: Recording,
        step: int,
        weights: Mapping[str, torch.Tensor],
        loss: Loss | None,
        *,
        exact: bool,
        streamed: bool = False,
    ):
        self.streamed, self.loss = streamed, loss
        self.model, self.exact = recording.build(), exact
        self.kernels: list[str] = []
        self.in_tf32 = tf32_of(recording, self.model)
        super().__init__(self.model)
        self.recording, self.step, self.folder = recording, step, recording.folder
        self.policies = recording.steps[step - 1][0].micro_batches[0].policies
        self.weights = weights
        self.draw = 0
        # A CPU does not draw the random numbers of another device.
        if recording.origin.device != "cpu":
            self.kernels = gpu_kernels.choose(self.model)
        for module in self.model.modules():
            # Checkpointing would compute again outside of the mode.
            if "gradient_checkpointing" in vars(module):
                vars(module).update(gradient_checkpointing=False)
        self.state = state_of(self.model)
        self.all_wide = {as_real(parameter).dtype for parameter in self.model.parameters()} == {torch.float64}
        given = Lazy(weights, self._weight_of)
        units = Streamed(self.model, given, self._again) if streamed else None
        building.give(self.model, given if units is None else units.outside(self._computed_in))
        # Of each module, which of its buffers are not None
        self.filled = {
            module: {key: buffer is not None for key, buffer in module._buffers.items()}
            for module in self.model.modules()
        }
        if exact:
            make_exact(self.model, _tables(self.model))
        frozen = set(recording.steps[step - 1][0].frozen)
        for name, parameter in self.model.named_parameters():
            if is_inexact(parameter):
                parameter.requires_grad_(name not in frozen)
        self.parameters = dict(self.model.named_parameters())
        self.gradients = GradientsOnDisk(self.folder)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.gradients.arrive, name))
        for name, policy in self.policies.items() if not exact else ():
            module = self.model.get_submodule(name)
            if policy.input:
                module.register_forward_pre_hook(
                    functools.partial(_cast, dtype_of(policy.input)), with_kwargs=True
                )
            if policy.output:
                # Before the hooks that see what the module returns, as in the run
                cast = functools.partial(_cast_output, dtype_of(policy.output))
                module.register_forward_hook(cast, prepend=True)
        # Integer outputs of modules, as they were returned
        self.indices: dict[str, torch.Tensor] = {}
        self.mode = Told()
        # The number of scores that each call of topk chooses from
        self.widths: dict[int, int] = {}
        # The dtypes that a pass in the run's dtypes draws random numbers in, and finds tensors in, by rank and number of a micro batch
        self.dtypes: dict[tuple[int, int], dict[int | Place, torch.dtype]] = {}
        # Of a model that returns its loss alone: the module that returns the logits, or CROSS_ENTROPY
        self.head = ""
        # The numbers of the calls of topk, by the output that has their indices; None if they are not known yet
        self.calls_of_topk: dict[str, int] | None = None

    def _weight_of(self, name: str) -> torch.Tensor:
        """Return a weight as the model has it: in the dtype that it computes in, perturbed if asked for, in the run's memory order."""
        weight = self.weights[name]
        weight = weight.to(self._computed_in(name, weight.dtype), copy=True)
        if self.draw and self.parameters[name].requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.draw)
            autocast = self.recording.steps[0][0].micro_batches[0].autocast
            # Autocast rounds the perturbed weight once more.
            size = torch.finfo(dtype_of(autocast)).eps / 4 if autocast else torch.finfo(weight.dtype).eps / 2
            weight = perturbed(weight, generator, size)
        weight = like(weight, self.recording.skeleton.get_parameter(name))
        order = self.recording.steps[self.step - 1][0].orders.get(name)
        return in_order(weight, order) if order else weight

    def give(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the model other weights."""
        self.weights = weights
        self.perturb(self.draw)

    def perturb(self, draw: int) -> None:
        """Give the model weights that are perturbed by one ulp, each number of a draw other ones; 0: its own."""
        self.draw = draw
        # The weights of a streamed model are read when they are needed.
        if not self.streamed:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self._weight_of(name))

    def _computed_in(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that the model has a weight in that the run had in `dtype`.

        The yardstick of a run in float64 is in float32: its errors must be larger than the run's.
        """
        if self.exact:
            return torch.float64
        policy = policy_of(name, self.policies)
        param_dtype = policy.param if policy else self.recording.steps[0][0].micro_batches[0].param_dtype
        return dtype_of(param_dtype) if param_dtype else torch.float32 if self.all_wide else dtype

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        super().keep(name, tensor)
        if not tensor.is_floating_point():
            self.indices[name] = tensor

    def _again(self) -> Context:
        """Return what makes the context in which what is computed next can be computed once more: in the mode, and with the same counts."""
        mode = self.mode
        saved = self.hooks.calls.copy(), mode.counts.copy()
        states = generators()

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            current = self.hooks.calls, mode.counts
            self.hooks.calls, mode.counts = map(Counter, saved)
            restore_generators(states)
            # Enter as a mode of torch alone: the default dtype is still the mode's.
            TorchFunctionMode.__enter__(mode)
            try:
                with self._of_device():
                    yield
            finally:
                TorchFunctionMode.__exit__(mode, None, None, None)
                self.hooks.calls, mode.counts = current

        return again

    def logits(self, micro_batch: JoinedMicroBatch) -> torch.Tensor | None:
        """Return the logits of a micro batch that the run need not have seen; None if the model gives none."""
        # Hooks keep what modules return only where gradients are computed.
        with (
            self._precision(micro_batch, self._mode(micro_batch, {})),
            torch.set_grad_enabled(bool(self.head)),
        ):
            output = self._forward(micro_batch)
            _, logits = outputs_of(output)
            # The list may have the chunks of one tensor.
            if isinstance(output, list):
                logits = micro_batch.join_chunks(list(tensors_of(output).values()))
        if logits is None and self.head == CROSS_ENTROPY:
            return in_rows(micro_batch, self.mode.entropies or [])[2]
        return self.modules.get(f"forward/{micro_batch.number}/{self.head}") if logits is None else logits

    def outputs(
        self, micro_batch: JoinedMicroBatch, like: JoinedMicroBatch | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Return what modules return for a micro batch that the run need not have seen, as far as the model can be called with it.

        The model's buffers and attributes are as they were for `like`.
        """
        with (
            contextlib.suppress(Exception),
            self._precision(micro_batch, self._mode(like or micro_batch, {})),
        ):
            for name, tensor in tensors_of(self._forward(micro_batch)).items():
                self.keep(f"forward/{micro_batch.number}/returned.{name}", tensor)
        return self.modules

    def unlike(self, one: JoinedMicroBatch, other: JoinedMicroBatch) -> list[str]:
        """Return the names of the buffers, numbers and texts of the model that differ between two micro batches.

        Other attributes may be of the batch before.
        """
        buffers, other_buffers = (self.recording.buffers(self.step, called) for called in (one, other))
        shared = [name for name in buffers.keys() & other_buffers.keys() if ":" not in name]
        unequal = [name for name in shared if not torch.equal(buffers[name], other_buffers[name])]
        values, other_values = one.record.attributes, other.record.attributes
        names = [
            name
            for name in values.keys() | other_values.keys()
            if values.get(name) != other_values.get(name)
            and not isinstance(values.get(name, other_values.get(name)), (dict, list))
        ]
        return sorted({name.replace(":", ".").removeprefix(".") for name in (*unequal, *names)})

    def _mode(self, micro_batch: JoinedMicroBatch, told: dict[str, torch.Tensor]) -> Told:
        """Return the mode of a pass over a micro batch in which the model makes the choices that it is `told`.

        It is kept as `self.mode`. The buffers and attributes that the pass begins with are kept, too.
        """
        self._begin_with(micro_batch)
        make = Float64 if self.exact else Float32 if self.all_wide else Told
        # The first such pass finds out which output has the indices of which call of topk.
        if told and self.calls_of_topk is None:
            mode = self.mode = make()
            with self._precision(micro_batch, mode), torch.no_grad():
                self._forward(micro_batch)
            numbers = {storage(indices): number for number, (_, indices) in mode.seen.items()}
            self.calls_of_topk = {
                module_of(name): numbers[storage(tensor)]
                for name, tensor in self.indices.items()
                if storage(tensor) in numbers
            }
            self.widths = mode.widths
        calls = self.calls_of_topk or {}
        choices = {calls[name]: tensor for name, tensor in told.items() if name in calls}
        self.mode = make(choices, self.widths)
        self.mode.dtypes = self.dtypes.setdefault((micro_batch.ranks[0], micro_batch.number), {})
        self.mode.entropies = [] if self.exact else None
        if self.recording.origin.device != "cpu":
            self.mode.kept_of = functools.partial(self.recording.dropped, self.step, micro_batch)
        return self.mode

    def note_draws(self, micro_batch: JoinedMicroBatch) -> None:
        """Note the dtypes in which a run in float64 drew random numbers: of a pass that computes as the run did. The model is exact."""
        self._begin_with(micro_batch)
        mode = self.mode = Told()
        mode.dtypes = self.dtypes.setdefault((micro_batch.ranks[0], micro_batch.number), {})
        with (
            default_dtype(dtype_of(micro_batch.record.default_dtype)),
            self._precision(micro_batch, mode),
            torch.no_grad(),
        ):
            self._forward(micro_batch)

    def _begin_with(self, micro_batch: JoinedMicroBatch) -> None:
        """Keep the buffers and attributes before a micro batch. A pass may change them, such as a mean or a bias of experts."""
        self.buffers, self.changed = (
            self.recording.buffers(self.step, micro_batch),
            micro_batch.record.attributes,
        )

    def _forward(self, micro_batch: JoinedMicroBatch) -> Any:
        """Call the model with a micro batch, in the state that it had before it; return what the model returns.

        Raises UserError if it cannot be called again with what was recorded.
        """
        if micro_batch.record.left_out:
            raise UserError(
                f"the model cannot be called again: {micro_batch.record.left_out[0]}; give it tensors, numbers, texts, or lists, tuples and dicts of them"
            )
        tensors = self._widened(micro_batch.tensors)
        tensors |= {name: in_order(tensors[name], order) for name, order in micro_batch.record.orders.items()}
        places = self.recording.steps[self.step - 1][micro_batch.ranks[0]].places
        # A stage of a pipeline gives the stage before a gradient.
        for name in tensors:
            place = f"backward/{micro_batch.number}/given.{name}"
            if place in places:
                tensors[name] = tensors[name].detach().requires_grad_()
                tensors[name].register_hook(functools.partial(self.keep, place))
        plain = building.values_of(self.recording.tree, self.model, micro_batch.record.plain, tensors)
        values = {**plain, **tensors}
        structure = treespec_loads(micro_batch.record.structure)
        given: dict[str, Any] = tree_unflatten(
            [values[name] for name in micro_batch.record.inputs], structure
        )
        signature = inspect.signature(self.model.forward)
        known = signature.parameters
        given |= {
            name: value
            for name, value in {"use_cache": False, **micro_batch.replaced_inputs}.items()
            if name in known
        }
        self._restore_state()
        for name, module in self.model.named_modules():
            module.training = name not in micro_batch.record.evaluated
        self.modules, self.indices = OnDisk(self.folder) if self.streamed else {}, {}
        self.hooks.begin(micro_batch.number)
        bound = inspect.BoundArguments(signature, {name: given.pop(name) for name in known if name in given})
        if micro_batch.generator_state is not None:
            torch.set_rng_state(micro_batch.generator_state)
        elif self.recording.origin.device == "cpu":
            # Nothing was drawn in the run. So a pass that draws is wrong, and must not differ from the next one.
            torch.manual_seed(0)
        restore_generators(micro_batch.record.generators)
        self.called = micro_batch
        output = self.model(*bound.args, **bound.kwargs, **given)
        if self.mode.kept_of is not None and self.mode.counts["dropout"] != micro_batch.record.dropouts:
            raise draws.other_dropouts(self.mode.counts["dropout"], micro_batch.record.dropouts)
        self.hooks.end()
        return output

    def _restore_state(self) -> None:
        """Give the model the buffers and attributes that it had before the micro batch."""
        tensors = {name: tensor for _, own in self.state.values() for name, tensor in own.items()}
        building.set_state(self.model, {name: value for name, (value, _) in self.state.items()}, tensors)
        buffers = self._widened(self.buffers)
        building.set_state(self.model, self.changed, buffers)
        for module, filled in self.filled.items():
            items = module._buffers.items()
            module._buffers = {key: buffer if filled[key] else None for key, buffer in items if key in filled}
        known = dict(self.model.named_buffers())
        for name, tensor in buffers.items():
            if name in known and known[name].shape == tensor.shape:
                # A forward pass may have asked for the buffer's gradient.
                known[name].detach().copy_(tensor)
            elif ":" not in name:
                module_name, _, key = name.rpartition(".")
                self.model.get_submodule(module_name)._buffers[key] = tensor.clone()

    def _widened(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors that are not weights as the model takes them.

        In the reference, those of floating point are in float64, too. In the yardstick of a run in float64, they are in float32.
        """
        return tensors | {
            name: in_width(tensor, torch.float64 if self.exact else torch.float32)
            for name, tensor in tensors.items()
            if self.exact or self.all_wide
        }

    @contextlib.contextmanager
    def _precision(self, micro_batch: JoinedMicroBatch, mode: Told) -> Iterator[None]:
        """The mode, the arithmetic of the run's device and the autocast that a micro batch is computed in."""
        dtype = None if self.exact else micro_batch.record.autocast
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if dtype:
            # Autocast's cache would keep the weights of all units of a streamed model.
            autocast = torch.autocast("cpu", dtype_of(dtype), cache_enabled=not self.streamed)
        with mode, self._of_device(), autocast:
            yield

    def _of_device(self) -> contextlib.AbstractContextManager[None]:
        """The arithmetic of the run's device, for a yardstick."""
        origin = self.recording.origin
        if self.exact:
            return contextlib.nullcontext()
        return gpu_arithmetic.as_in_the_run(origin.device, origin.threads, self.in_tf32, origin.versions)


def _cast(dtype: torch.dtype, _module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Cast what a module is called with, as FSDP2 does."""
    return _in_dtype(dtype, (args, kwargs))


def _cast_output(dtype: torch.dtype, _module: torch.nn.Module, _args: tuple, output: Any) -> Any:
    """Cast what a module returns, as FSDP2 does."""
    return _in_dtype(dtype, output)


def _in_dtype(dtype: torch.dtype, nested: Any) -> Any:
    return tree_map(
        lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, nested
    )


def policy_of(name: str, policies: Mapping[str, Policy]) -> Policy | None:
    """Return FSDP2's policy of a weight: that of the nearest module around it."""
    module = name
    while module:
        module = module.rpartition(".")[0]
        if module in policies:
            return policies[module]
    return None


def tf32_of(recording: Recording, model: torch.nn.Module) -> list[str]:
    """Return which products of float32 the run's device may have computed in TF32, or as inexactly."""
    if not recording.origin.device.startswith("cuda") or all(
        parameter.dtype != torch.float32 for parameter in model.parameters()
    ):
        return []
    classes = {type(module) for module in model.modules()}
    has_convolution = any(issubclass(kind, torch.nn.modules.conv._ConvNd) for kind in classes)
    is_recurrent = any(issubclass(kind, torch.nn.RNNBase) for kind in classes)
    return [name for name in recording.origin.tf32 if has_convolution or name != "convolution"] + [
        "recurrent"
    ] * is_recurrent


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as torch.float32, as a recording has it."""
    return getattr(torch, name.removeprefix("torch."))


def _tables(model: torch.nn.Module) -> list[str]:
    """Return the names of modules without weights but with buffers, such as a rotary table: they stay as they are in the runs."""
    return [
        name
        for name, module in model.named_modules()
        if name and not list(module.children()) and not list(module.parameters()) and list(module.buffers())
    ]
