"""The recorded model, called again by one process with the micro batches that the run saw: in float64, or as the run computes."""

import contextlib
import functools
import inspect
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten, treespec_loads

from lockstep.dumps import building, tree
from lockstep.dumps.called import LOG_PROBS, Called
from lockstep.dumps.kept import generators, restore_generators
from lockstep.dumps.model_outputs import map_left, outputs_of, tensors_of
from lockstep.dumps.module_hooks import module_of
from lockstep.dumps.recording import Recording
from lockstep.dumps.trace import storage
from lockstep.ground.errors import UserError, first_line
from lockstep.inputs.weights import perturbed
from lockstep.verdict import draws, gpu_kernels, own_loss, trl_head
from lockstep.verdict.computed import Computed, Passes, Term
from lockstep.verdict.float64 import Float32, Float64, Told, make_exact
from lockstep.verdict.lazy import Lazy, OnDisk
from lockstep.verdict.normalisation import Gradients, Sum
from lockstep.verdict.own_loss import Loss
from lockstep.verdict.recorded_loss import SAME, mean_of
from lockstep.verdict.streamed import Context, Streamed


class _GradientsOnDisk:
    """What arrives at parameters, so that memory has no gradient but the one that has just arrived.

    The hooks of a model have this. They must not have the model itself: Python would never free it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """A micro batch begins."""
        self.kept = OnDisk(self.folder)
        self.largest = torch.zeros((), dtype=torch.float64)  # of all its elements; NaN if one is

    def add(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        before = self.kept.get(name)
        gradient = parameter.grad.to_dense() if before is None else before + parameter.grad
        if gradient.numel():
            self.largest = torch.maximum(self.largest, gradient.abs().max().double())
        self.kept[name] = gradient
        parameter.grad = None

    def take(self) -> OnDisk:
        """What has arrived since `begin`, or since it was taken last."""
        taken, self.kept = self.kept, OnDisk(self.folder)
        taken.close()
        return taken


class Reference(Passes):
    """Computes the loss of a micro batch of a step and its gradient. `exact`: in float64. `weights` are those before the step.

    `loss` is the loop's own: it is given what the model returned and the recorded tensors by name, and returns the mean of the micro batch;
    or (its sum, how many it is a sum over). A dict after these has further terms of it, by name.

    `streamed`: memory has the weights of one unit of the model at a time (lockstep/verdict/streamed.py), and what modules return is on disk.
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
        self.loss, self.streamed = loss, streamed
        self.model, self.exact = recording.build(), exact
        self.kernels: list[str] = []
        super().__init__(self.model)
        self.recording, self.step, self.folder = recording, step, recording.folder
        self.weights = weights
        self.draw = 0
        self.dropping: dict[str, torch.nn.Dropout] = {}
        if recording.origin.device != "cpu":  # whose random numbers a CPU does not draw
            self.kernels = gpu_kernels.choose(self.model)
            evaluated = set.intersection(
                *(set(one.evaluated) for one in recording.steps[step - 1][0].micro_batches)
            )
            self.dropping = draws.dropout_modules(self.model, evaluated)
            _require_no_tf32(recording, self.model)
        for name, dropout in self.dropping.items():
            vars(dropout)["forward"] = functools.partial(self._drop, name, dropout.p)
        for module in self.model.modules():
            if "gradient_checkpointing" in vars(module):  # it would compute again outside of the mode
                vars(module).update(gradient_checkpointing=False)
        self.state = tree.state_of(self.model)
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
        self.gradients = _GradientsOnDisk(self.folder)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.gradients.add, name))
        self.indices: dict[str, torch.Tensor] = {}  # integer outputs of modules, as they were returned
        self.mode = Told()
        self.widths: dict[int, int] = {}  # of all calls of topk
        # The dtypes that the run draws random numbers in, by rank and number of a micro batch; those of a pass in the run's dtypes
        self.drawn: dict[tuple[int, int], dict[int, torch.dtype]] = {}
        self.calls_of_topk: dict[str, int] | None = None  # by the output that has their indices

    def _own(self, name: str) -> torch.Tensor:
        """A weight as the model has it."""
        weight = self.weights[name]
        weight = weight.to(self._computed_in(weight.dtype), copy=True)
        if self.draw and self.parameters[name].requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.draw)
            lower = self.recording.steps[0][0].micro_batches[0].autocast
            # Autocast rounds what was moved once more.
            size = torch.finfo(_dtype(lower)).eps / 4 if lower else torch.finfo(weight.dtype).eps / 2
            weight = perturbed(weight, generator, size)
        return (
            _channels_last(weight) if name in self.recording.steps[self.step - 1][0].channels_last else weight
        )

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
        return _dtype(cast) if cast else torch.float32 if self.all_wide else dtype

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        super().keep(name, tensor)
        if not tensor.is_floating_point():
            self.indices[name] = tensor

    def _again(self) -> Context:
        """For a later computation of what is computed next: in the mode, and counted alike."""
        before = Counter(self.hooks.calls), self.mode.calls, self.mode.draws
        states = generators()

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            now = self.hooks.calls, self.mode.calls, self.mode.draws
            self.hooks.calls, self.mode.calls, self.mode.draws = Counter(before[0]), *before[1:]
            restore_generators(states)
            TorchFunctionMode.__enter__(self.mode)  # the default dtype is still the mode's
            try:
                yield
            finally:
                TorchFunctionMode.__exit__(self.mode, None, None, None)
                self.hooks.calls, self.mode.calls, self.mode.draws = now

        return again

    def compute(
        self,
        called: Called,
        told: dict[str, torch.Tensor] | None = None,
        written: dict[str, torch.Tensor] | None = None,
        free: Computed | None = None,
    ) -> Computed:
        """`told` are the choices that the model shall make, such as of experts: the recorded integer outputs of modules, by name.

        `written` are recorded outputs of modules and gradients that arrived there. Each takes the place of the one that is computed, so
        every module computes from the inputs that it had in the run. `free` is then what was computed without them.

        Raises UserError if the model cannot be called again, or returns nothing that was trained.
        """
        if self.loss is not None and LOG_PROBS in called.arrived:
            raise UserError(
                "--loss: TRL replaced the forward method of the model, and what it returns rounds otherwise; judge without --loss, from what arrives there on"
            )
        self.gradients.begin()
        of_means = LOG_PROBS in called.arrived and self._trains_on_means
        try:
            mode = self._mode(called, told or {})
            self.written = written or {}
            with self._precision(called, mode), _without_reentrant_checkpointing():
                return self._computed(called, mode, free, of_means=of_means)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            why = "; its forward pass communicates, which one process cannot" * (
                "process group" in str(error)
            )
            left_out = self.recording.tree.get("left_out", [])
            why += f"; of the model, this was left out: {', '.join(left_out[:3])}" * bool(left_out)
            raise UserError(
                f"the recorded model cannot be called again with micro batch {called.number} ({type(error).__name__}: {first_line(error)}){why}"
            ) from error
        finally:
            self.written = {}

    def logits(self, called: Called) -> torch.Tensor | None:
        """What the model returns for a micro batch that the run need not have seen; None without logits."""
        with self._precision(called, self._mode(called, {})), torch.no_grad():
            _, logits = outputs_of(self._forward(called))
        return logits

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
        self.mode.drawn = self.drawn.setdefault((called.ranks[0], called.number), {})
        return self.mode

    def _forward(self, called: Called) -> Any:
        """What the model returns."""
        if called.about.left_out:
            raise UserError(
                f"the model cannot be called again: {called.about.left_out[0]}; give it tensors, numbers, texts, or lists, tuples and dicts of them"
            )
        tensors = self._widened(called.tensors)
        tensors |= {name: _channels_last(tensors[name]) for name in called.about.channels_last}
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
        draws.require_called(self.dropping, self.hooks.calls)
        self.hooks.end()
        return output

    def _drop(self, name: str, p: float, tensor: torch.Tensor) -> torch.Tensor:
        """In the place of a dropout module's forward method: leaves out what it left out in the run, as its recorded output shows."""
        if not self.dropping[name].training:
            return tensor
        place = f"forward/{self.called.number}/{self.hooks.next_call(name)}"
        if place not in self.recording.steps[self.step - 1][self.called.ranks[0]].places:
            raise draws.dropout_is_active(p, name)
        with torch._C.DisableTorchFunction():  # where float32 means float64, a file could not be read
            found, _ = self.recording.whole(self.step, place, self.called.ranks)
        return tensor * (found != 0) / (1 - p)

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
                known[name].copy_(tensor)
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

    def _computed(self, called: Called, mode: Told, free: Computed | None, *, of_means: bool) -> Computed:
        output = self._forward(called)
        loss, logits = outputs_of(output)
        if logits is not None and LOG_PROBS in called.arrived and not of_means:
            output[LOG_PROBS] = trl_head.log_probs(called, logits)
        returned = self._returned(called, output)
        missing = (called.arrived.keys() | called.about.scalars.keys()) - returned.keys()  # as of TRL
        terms: dict[str, Term] = {}
        at: dict[str, dict[str, torch.Tensor]] = {}
        often = called.about.scalars
        arrived, unknown, number = 1.0, False, 0.0
        if self.loss is not None:
            tensors = self._widened(called.tensors if called.piece is None else called.piece.own)
            scalars, number, at = own_loss.computed(self.loss, output, tensors, called.piece)
            loss, often = scalars[""], own_loss.arrived(called, at)
            arrived = often[""] or 1.0
        elif called.has_own_loss and not missing:
            loss, logits, arrived = None, self._begun_at(called, returned), called.about.scale
        elif loss is not None:
            _require_labels_of_piece(called)
            scalars = {name: one for name, one in returned.items() if one.ndim == 0}
            own = next(name for name, one in scalars.items() if one is loss)
            unknown = own not in often
            arrived = often.get(own, 1.0)
        else:
            raise UserError(
                f"the model returns no {', '.join(missing)} when it is called again; its forward method was replaced, or a hook makes it"
            )
        if loss is not None:
            terms = self._terms(loss, scalars) if free is None else free.terms
            if terms and called.piece is not None and self.loss is None:
                raise UserError(
                    f"the model's loss has {next(iter(terms))}, of a piece of the samples alone, which no process has that computes the whole"
                )
            for scalar, each in at.items():
                for name, one in each.items():
                    place = f"backward/{called.number}/returned.{name}"
                    self.modules[place] = self.modules.get(place, 0.0) + often[scalar] * one
            if logits is not None and logits.requires_grad:
                logits.retain_grad()
            for name, term in terms.items():
                term.beside = often.get(name, 0.0)
            begun = [(loss, arrived), *((scalars[name], term.beside) for name, term in terms.items())]
            torch.autograd.backward([one for one, _ in begun], [one.new_tensor(of) for one, of in begun])
            if unknown:  # so what arrives at the modules is, too
                self._leave_backward_out()
        # A forced pass has one gradient for all terms: what takes another's place is that of their sum.
        found = self._gradients_of_loss(called, arrived, terms if free is None else {})
        value = None if loss is None else float(loss.detach())
        taken = mode.taken({number: name for name, number in (self.calls_of_topk or {}).items()})
        computed = Computed(found, value, math.nan if unknown else arrived, terms, self.modules, taken)
        if free is not None:
            return computed
        if loss is not None and logits is not None and logits.grad is not None:
            computed.logits, computed.at_logits = logits.detach(), logits.grad / arrived
        if self.exact:
            if value is not None:
                value -= sum(term.coefficient * term.value for term in terms.values())
            computed.mean = mean_of(called, value, logits, number)
        return computed

    def _returned(self, called: Called, output: Any) -> dict[str, torch.Tensor]:
        """What the model returns, and what it leaves in its modules and is trained on; keeps what the run has of it, which no module returned."""
        returned, trained = tensors_of(output), called.arrived.keys() | called.about.scalars.keys()
        recorded = self.recording.steps[self.step - 1][called.ranks[0]].places
        for name, one in returned.items():
            place = f"forward/{called.number}/returned.{name}"
            if place in recorded:
                self.keep(place, one)
        map_left(self.model, lambda name, one: returned.setdefault(name, one) if name in trained else one)
        return returned

    def _begun_at(self, called: Called, returned: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Begin the backward pass with what arrived at what the model returned. Returns that, if it is one tensor."""
        if called.piece is not None:
            returned = {name: called.piece.cut(one) for name, one in returned.items()}
        begun = {name: one.to(returned[name].dtype) for name, one in called.arrived.items()}
        begun |= {name: returned[name].new_tensor(one) for name, one in called.about.scalars.items()}
        for name, one in begun.items():
            if one.shape != returned[name].shape:
                raise UserError(
                    f"what the model returns as {name} is of shape {tuple(one.shape)} in the run, and {tuple(returned[name].shape)} in one process, "
                    "so each rank is given a shard of it; return the whole, or a DTensor"
                )
        torch.autograd.backward([returned[name] for name in begun], list(begun.values()))
        return returned[next(iter(begun))] if len(begun) == 1 else None

    @functools.cached_property
    def _trains_on_means(self) -> bool:
        """Whether a loop trains on means of log-probabilities. One micro batch may look so by chance, such as where all advantages are alike."""
        return all(
            trl_head.is_mean(called)
            for step in range(1, len(self.recording.steps) + 1)
            for called in self.recording.micro_batches(step)
            if LOG_PROBS in called.arrived
        )

    def _gradients_of_loss(self, called: Called, arrived: float, terms: dict[str, Term]) -> Gradients:
        """The gradients of the loss alone: the pass was begun with what `arrived` at it in the run, and at further terms."""
        kept = self._arrived_gradients()
        if kept and not bool((self.gradients.largest / arrived).isfinite()):
            why = "without any label, a mean is 0 / 0; leave it out of the recorded steps, or let the loss be a sum"
            if self.streamed:
                why += "; or a weight is used outside of its module, which needs more --memory"
            raise UserError(
                f"micro batch {called.number} of rank {called.ranks[0]} has no finite gradient in the reference: {why}"
            )

        there = list(terms.values())
        weights = torch.tensor([1.0, *(-term.beside for term in there)], dtype=torch.float64) / arrived
        return Sum(kept, [kept, *(term.gradients for term in there)], weights)

    def _arrived_gradients(self) -> Gradients:
        """What has arrived at the parameters."""
        kept = self.gradients.take()
        return Lazy([name for name in self.parameters if name in kept], kept.__getitem__)

    def _terms(self, loss: torch.Tensor, scalars: dict[str, torch.Tensor]) -> dict[str, Term]:
        found = {}
        for name, value in scalars.items():
            if value is loss or not value.requires_grad:
                continue
            others = [
                one for one in scalars.values() if one.requires_grad and one is not loss and one is not value
            ]
            if others and name not in self.called.about.scalars:
                (within,) = torch.autograd.grad(others, value, retain_graph=True, allow_unused=True)
                if within is not None:  # it counts as another one, which is made of it
                    continue
            (coefficient,) = torch.autograd.grad(loss, value, retain_graph=True, allow_unused=True)
            torch.autograd.backward(value, retain_graph=True)
            gradients = self._arrived_gradients()
            inside = 0.0 if coefficient is None else float(coefficient)
            found[name] = Term(float(value.detach()), inside, gradients)
        parts = {name: term.coefficient * term.value for name, term in found.items()}
        if parts and self.exact and math.isclose(sum(parts.values()), float(loss.detach()), rel_tol=SAME):
            # The loss is the sum of all that is returned beside it: one of them is the rest, which the others are held against.
            found.pop(max(parts, key=lambda name: abs(parts[name])))
        self._leave_backward_out()  # what has arrived at the modules was not the gradient of the loss
        return found

    def _leave_backward_out(self) -> None:
        for name in [name for name in self.modules if name.startswith("backward/")]:
            del self.modules[name]

    @contextlib.contextmanager
    def _precision(self, called: Called, mode: Told) -> Iterator[None]:
        dtype = called.about.autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(mode)
            if dtype is not None and not self.exact:
                # Its cache would keep the weights of all units.
                stack.enter_context(torch.autocast("cpu", _dtype(dtype), cache_enabled=not self.streamed))
            yield


def _require_no_tf32(recording: Recording, model: torch.nn.Module) -> None:
    """Raise UserError for a run in float32 whose GPU computed in TF32, which has 10 bits and no CPU."""
    micro = recording.steps[0][0].micro_batches[0]
    single = any(one.dtype == torch.float32 for one in model.parameters())
    convolves = any(isinstance(one, torch.nn.modules.conv._ConvNd) for one in model.modules())
    found = [one for one in recording.origin.tf32 if convolves or one != "convolution"]
    if found and single and micro.autocast is None and micro.param_dtype in (None, "torch.float32"):
        raise UserError(
            f"the run's device may have computed {' and '.join(found)} of float32 in TF32, which a CPU cannot, so errors would be too large for float32; "
            'record a run with torch.backends.fp32_precision = "ieee", or in torch before 2.9 with both allow_tf32 False'
        )


def _require_labels_of_piece(called: Called) -> None:
    if called.piece is not None and called.piece.labels is None:
        raise UserError(
            f"the model is called with pieces of samples, and none of {', '.join(called.tensors)} is named as labels are, so the loss of a piece is not known; "
            "name them labels or targets"
        )


class _Called:
    """In the place of what makes a reentrant checkpoint: it calls the function, and nothing is computed again."""

    @staticmethod
    def apply(function: Callable[..., Any], _keep_random_state: bool, *arguments: Any) -> Any:
        return function(*arguments)


@contextlib.contextmanager
def _without_reentrant_checkpointing() -> Iterator[None]:
    """It gives no gradient to what is inside of it if none of its inputs needs one, which is no property of the computation."""
    file: Any = torch.utils.checkpoint
    real, file.CheckpointFunction = file.CheckpointFunction, _Called
    try:
        yield
    finally:
        file.CheckpointFunction = real


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    order = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    return tensor.contiguous(memory_format=order)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def _tables(model: torch.nn.Module) -> list[str]:
    """Modules without weights but with buffers, such as a rotary table: they stay as they are in the runs."""
    return [
        name
        for name, module in model.named_modules()
        if name and not list(module.children()) and not list(module.parameters()) and list(module.buffers())
    ]
