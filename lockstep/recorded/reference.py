"""What the recorded model gives for the micro batches that the run saw: losses and gradients, in float64, or as the run computes."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.ground.errors import CannotComputeError, UserError, communicates, first_line
from lockstep.recorded import own_loss, trl_head
from lockstep.recorded.model import CROSS_ENTROPY, Model
from lockstep.recorded.own_loss import Loss
from lockstep.recorded.streamed import Streamed
from lockstep.recorder.called import LOG_PROBS, Called
from lockstep.recorder.model_outputs import map_left, outputs_of, tensors_of
from lockstep.recorder.module_hooks import module_of
from lockstep.recorder.recording import Recording
from lockstep.verdict.computed import Computed, Term
from lockstep.verdict.float64 import Entropy, Told
from lockstep.verdict.lazy import Lazy, OnDisk
from lockstep.verdict.mean_over import SAME, labels_of, mean_of, mean_of_calls
from lockstep.verdict.normalisation import Gradients, Sum


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

    def arrive(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.add(name, parameter.grad)
        parameter.grad = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        before = self.kept.get(name)
        gradient = tensor.to_dense() if before is None else before + tensor
        if gradient.numel():
            largest = torch.linalg.vector_norm(gradient, torch.inf)
            self.largest = torch.maximum(self.largest, largest.double())
        self.kept[name] = gradient

    def take(self) -> OnDisk:
        """What has arrived since `begin`, or since it was taken last."""
        taken, self.kept = self.kept, OnDisk(self.folder)
        taken.close()
        return taken


COMMUNICATES = "its forward pass communicates, which one process cannot: record the same training by one process, too, and say --against that recording"


class Reference(Model):
    """Computes the loss of a micro batch of a step and its gradient. `exact`: in float64. `weights` are those before the step.

    `loss` is the loop's own: it is given what the model returned, and the recorded tensors and the parameters by name, and returns the mean of the micro batch;
    or (its sum, how many it is a sum over). A dict after these has further terms of it, by name.

    `streamed`: memory has the weights of one unit of the model at a time (lockstep/recorded/streamed.py), and what modules return is on disk.
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
        super().__init__(recording, step, weights, exact=exact, streamed=streamed)
        self.loss = loss
        self.gradients = _GradientsOnDisk(self.folder)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.gradients.arrive, name))

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
            with (
                self._precision(called, mode),
                _checkpoints_as_meant(again=mode.kept_of is None),
            ):
                return self._computed(called, mode, free, of_means=of_means)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            said = str(error)
            left_out = sorted(  # first what the error names
                self.recording.tree.get("left_out", []),
                key=lambda one: one.partition(":")[0].rpartition(".")[2] not in said,
            )
            why = f"; {COMMUNICATES}" if communicates(error) else ""
            why += f"; of the model, this was left out: {', '.join(left_out[:3])}" * bool(left_out)
            raise CannotComputeError(
                f"the recorded model cannot be called again with micro batch {called.number} ({type(error).__name__}: {first_line(error)}){why}"
            ) from error
        finally:
            self.written = {}

    def _computed(self, called: Called, mode: Told, free: Computed | None, *, of_means: bool) -> Computed:
        output = self._forward(called)
        calls = list(mode.entropies or [])  # of the model's own code
        loss, logits = outputs_of(output)
        if logits is not None and LOG_PROBS in called.arrived and not of_means:
            output[LOG_PROBS] = trl_head.log_probs(called, logits)
        returned = self._returned(called, output)
        # As of TRL
        missing = (called.arrived.keys() | called.about.scalars.keys()) - returned.keys()
        terms: dict[str, Term] = {}
        at: dict[str, dict[str, torch.Tensor]] = {}
        often = called.about.scalars
        arrived, unknown, number = 1.0, False, 0.0
        if self.loss is not None:
            tensors = self._widened(called.tensors if called.piece is None else called.piece.own)
            scalars, number, at = own_loss.computed(self.loss, output, tensors, self.parameters, called.piece)
            loss, often = scalars[""], own_loss.arrived(called, at)
            arrived = often[""] or 1.0
        elif called.has_own_loss and not missing:
            loss, logits, arrived = None, self._begun_at(called, returned), called.about.scale
        elif (loss := returned.get(called.other_loss or "", loss)) is not None:
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
            terms = self._terms(loss, scalars, number or 1.0) if free is None else free.terms
            if terms and called.piece is not None and self.loss is None:
                raise UserError(
                    f"the model's loss has {next(iter(terms))}, of a piece of the samples alone, which no process has that computes the whole"
                )
            self._keep_at_returned(called, at, often)
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
            unknown_labels = computed.mean.targets is None and called.piece is None
            if computed.at_logits is not None and computed.logits is not None and unknown_labels:
                computed.mean.targets = labels_of(computed.logits, computed.at_logits)
            if logits is None and value is not None:
                self._look_for_head(called, computed, value, number, calls)
        return computed

    def _keep_at_returned(
        self, called: Called, at: dict[str, dict[str, torch.Tensor]], often: Mapping[str, float]
    ) -> None:
        """What arrives at what the model returned, from a loss that was given: `at` has the gradients of its scalars there."""
        for scalar, each in at.items():
            for name, one in each.items():
                place = f"backward/{called.number}/returned.{name}"
                self.modules[place] = self.modules.get(place, 0.0) + often[scalar] * one

    def _look_for_head(
        self, called: Called, computed: Computed, loss: float, number: float, calls: list[Entropy]
    ) -> None:
        """Of a model that returns its loss alone, the logits are those whose cross-entropy it is: it calls that function, or a module returns them."""
        names = [name for name, one in self.modules.items() if name.startswith("forward/") and one.ndim > 1]
        of_head = mean_of(called, loss, self.modules[names[-1]], number) if names else computed.mean
        of_calls = mean_of_calls(called, loss, calls, number)
        if of_head.targets is not None:
            computed.mean, self.head = of_head, module_of(names[-1])
        elif of_calls.divisor:
            computed.mean, self.head = of_calls, CROSS_ENTROPY

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
        """Begin the backward pass with what arrived at what the model returned. Returns that, if it is one tensor, or pieces of one."""
        if called.piece is not None:
            returned = {name: called.piece.cut(one) for name, one in returned.items()}
        called.fill_chunks(returned)
        begun = {name: one.to(returned[name].dtype) for name, one in called.arrived.items()}
        begun |= {name: returned[name].new_tensor(one) for name, one in called.about.scalars.items()}
        for name, one in begun.items():
            if one.shape != returned[name].shape:
                raise UserError(
                    f"what the model returns as {name} is of shape {tuple(one.shape)} in the run, and {tuple(returned[name].shape)} in one process, "
                    "so each rank is given a shard of it; return the whole, or a DTensor"
                )
        torch.autograd.backward([returned[name] for name in begun], list(begun.values()))
        return called.whole_of([returned[name] for name in begun])

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
        for name, one in called.beside.items() if self.loss is None else ():
            self.gradients.add(name, one.to(self._computed_in(one.dtype)))
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

    def _terms(self, loss: torch.Tensor, scalars: dict[str, torch.Tensor], number: float) -> dict[str, Term]:
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
            found[name] = Term(float(value.detach()), inside, gradients, number)
        parts = {name: term.coefficient * term.value for name, term in found.items()}
        if parts and self.exact and math.isclose(sum(parts.values()), float(loss.detach()), rel_tol=SAME):
            # The loss is the sum of all that is returned beside it: one of them is the rest, which the others are held against.
            found.pop(max(parts, key=lambda name: abs(parts[name])))
        # What has arrived at the modules was not the gradient of the loss
        self._leave_backward_out()
        return found

    def _leave_backward_out(self) -> None:
        for name in [name for name in self.modules if name.startswith("backward/")]:
            del self.modules[name]


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


def _nothing_kept() -> Iterator[None]:
    """What torch's checkpoint goes on with after the function."""
    yield


@contextlib.contextmanager
def _checkpoints_as_meant(*, again: bool) -> Iterator[None]:
    """What they do to gradients is no property of the computation: the reference computes what it would be without them.

    A reentrant one gives no gradient to what is inside of it if none of its inputs needs one. One that does not keep the random state computes other
    numbers again than it computed. `again` is false where nothing may be computed again, as where what dropout keeps is counted by its calls.
    """
    file: Any = torch.utils.checkpoint
    real = file.CheckpointFunction, file._checkpoint_without_reentrant_generator

    def keeping(function: Callable[..., Any], _keep_random_state: bool, *arguments: Any, **named: Any) -> Any:
        return real[1](function, True, *arguments, **named)

    def of_units(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        is_own = getattr(function, "__qualname__", "").startswith(Streamed.__name__)
        return keeping(function, *given, **named) if is_own else _nothing_kept()

    file.CheckpointFunction = _Called
    file._checkpoint_without_reentrant_generator = keeping if again else of_units
    try:
        yield
    finally:
        file.CheckpointFunction, file._checkpoint_without_reentrant_generator = real
