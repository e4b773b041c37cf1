"""Compute losses and gradients of the recorded model: one class for the reference and for the yardstick."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.ground.errors import CannotComputeError, UserError, communicates, first_line
from lockstep.recorded import own_loss, trl_head
from lockstep.recorded.model import CROSS_ENTROPY, Model
from lockstep.recorder.complex_numbers import like
from lockstep.recorder.micro_batch import LOG_PROBS, JoinedMicroBatch
from lockstep.recorder.model_outputs import map_left, outputs_of, tensors_of
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.computed import Computed, Term
from lockstep.verdict.float64 import Entropy, Told
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.mean_over import SAME, mean_of, mean_of_calls, recognise
from lockstep.verdict.normalisation import Gradients, Sum

COMMUNICATES = "its forward pass communicates, which one process cannot: record the same training by one process, too, and say --against that recording"


class ModelPass(Model):
    """Computes losses and gradients of the recorded model for micro batches of a step.

    `exact`: in float64, which is the reference. Else it computes as the run does, which is the yardstick.
    `weights` are those before the step. `loss` is the loop's own loss. It is given what the model returned,
    and a dict of the recorded tensors and the parameters by name. It returns the mean of the micro batch, or
    (its sum, how many it is a sum over). A dict after these has further terms of the loss, by name.

    `streamed`: memory has the weights of one unit of the model at a time (lockstep/recorded/streamed.py), and
    the outputs of modules are on disk.
    """

    # The part of a model's loss that the others are held against, if the loss is the sum of all that is returned beside it
    rest_of_loss = ""

    def compute(
        self,
        micro_batch: JoinedMicroBatch,
        told: dict[str, torch.Tensor] | None = None,
        written: dict[str, torch.Tensor] | None = None,
        free: Computed | None = None,
    ) -> Computed:
        """Compute the loss of a micro batch, its gradient, and the outputs of modules.

        `told` are the choices that the model shall make, such as of experts: the recorded integer outputs of
        modules, by name. `written` are recorded outputs of modules, and gradients that arrived there. Each
        takes the place of the computed one, so every module computes from the inputs that it had in the run.
        `free` is then the result of a pass without them.

        Raises UserError if the model cannot be called again, or returns nothing that was trained.
        """
        if self.loss is not None and LOG_PROBS in micro_batch.output_gradients:
            raise UserError(
                "--loss: TRL replaced the forward method of the model, and what it returns rounds otherwise; judge without --loss, from what arrives there on"
            )
        self.gradients.begin()
        of_means = LOG_PROBS in micro_batch.output_gradients and self._trains_on_means
        try:
            mode = self._mode(micro_batch, told or {})
            self.written = written or {}
            with self._precision(micro_batch, mode):
                return self._compute(micro_batch, mode, free, of_means=of_means)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            text = str(error)
            # First what the error names
            left_out = sorted(
                self.recording.tree.get("left_out", []),
                key=lambda entry: entry.partition(":")[0].rpartition(".")[2] not in text,
            )
            why = f"; {COMMUNICATES}" if communicates(error) else ""
            why += f"; of the model, this was left out: {', '.join(left_out[:3])}" * bool(left_out)
            raise CannotComputeError(
                f"the recorded model cannot be called again with micro batch {micro_batch.number} ({type(error).__name__}: {first_line(error)}){why}"
            ) from error
        finally:
            # All that the pass holds, but for its result: the next one needs the memory.
            self.written, self.modules, self.mode.entropies = {}, {}, None

    def _compute(
        self, micro_batch: JoinedMicroBatch, mode: Told, free: Computed | None, *, of_means: bool
    ) -> Computed:
        """Make the forward and the backward pass of `compute`, inside of `mode`.

        `of_means`: the loop trains on means of TRL's log-probabilities, as the loss that the model returns
        is.
        """
        output = self._forward(micro_batch)
        # The calls of cross_entropy in the model's own code
        calls = list(mode.entropies or [])
        loss, logits = outputs_of(output)
        if logits is not None and LOG_PROBS in micro_batch.output_gradients and not of_means:
            output[LOG_PROBS] = trl_head.log_probs(micro_batch, logits)
        returned = self._returned(micro_batch, output)
        # Such as log-probabilities, where TRL replaced the forward method
        missing = (micro_batch.output_gradients.keys() | micro_batch.record.scalars.keys()) - returned.keys()
        terms: dict[str, Term] = {}
        # The gradients of the loop's own loss and its terms at what the model returned
        dy: dict[str, dict[str, torch.Tensor]] = {}
        # By scalar: the gradient that arrived there in the run, which is how often it counts
        counts = micro_batch.record.scalars
        arrived, is_unknown, number = 1.0, False, 0.0
        if self.loss is not None:
            tensors = self._widened(
                micro_batch.tensors if micro_batch.piece is None else micro_batch.piece.inputs
            )
            scalars, number, dy = own_loss.computed(
                self.loss, output, tensors, self.parameters, micro_batch.piece
            )
            loss, counts = scalars[""], own_loss.arrived(micro_batch, dy)
            arrived = counts[""] or 1.0
        elif micro_batch.has_own_loss and not missing:
            loss, logits, arrived = (
                None,
                self._begin_backward(micro_batch, returned),
                micro_batch.record.scale,
            )
        elif (loss := returned.get(micro_batch.loss_name or "", loss)) is not None:
            _require_labels_of_piece(micro_batch)
            scalars = {name: tensor for name, tensor in returned.items() if tensor.ndim == 0}
            loss_name = next(name for name, tensor in scalars.items() if tensor is loss)
            is_unknown = loss_name not in counts
            arrived = counts.get(loss_name, 1.0)
        else:
            raise UserError(
                f"the model returns no {', '.join(missing)} when it is called again; its forward method was replaced, or a hook makes it"
            )
        if loss is not None:
            terms = self._terms(loss, scalars, number or 1.0) if free is None else free.terms
            if terms and micro_batch.piece is not None and self.loss is None:
                raise UserError(
                    f"the model's loss has {next(iter(terms))}, of a piece of the samples alone, which no process has that computes the whole"
                )
            self._keep_at_returned(micro_batch, dy, counts)
            if self.exact and free is None and logits is not None and logits.requires_grad:
                logits.retain_grad()
            for name, term in terms.items():
                term.beside = counts.get(name, 0.0)
            starts = [(loss, arrived), *((scalars[name], term.beside) for name, term in terms.items())]
            torch.autograd.backward([x for x, _ in starts], [x.new_tensor(factor) for x, factor in starts])
            # If the gradient at the loss is not known, those at modules are not, either.
            if is_unknown:
                self._drop_backward()
        # A forced pass has one gradient for all terms: the recorded gradients in it are those of their sum.
        gradients = self._gradients_of_loss(micro_batch, arrived, terms if free is None else {})
        value = None if loss is None else float(loss.detach())
        told = mode.taken({call: name for name, call in (self.calls_of_topk or {}).items()})
        computed = Computed(gradients, value, math.nan if is_unknown else arrived, terms, self.modules, told)
        if free is not None:
            return computed
        if loss is not None and logits is not None:
            computed.logits = logits.detach()
        if self.exact:
            if value is not None:
                value -= sum(term.coefficient * term.value for term in terms.values())
            computed.mean = mean_of(micro_batch, value, logits, number)
            at_logits = None if loss is None or logits is None else logits.grad
            if at_logits is not None:
                computed.at_logits = float((at_logits.norm() / arrived).abs())
            needs_labels = computed.mean.targets is None and micro_batch.piece is None
            if at_logits is not None and computed.logits is not None and needs_labels:
                # Whatever the weights of its tokens
                recognised = recognise(computed.logits, at_logits / arrived)
                computed.mean.targets = None if recognised is None else recognised.labels
            if logits is None and value is not None:
                self._look_for_head(micro_batch, computed, value, number, calls)
        return computed

    def _keep_at_returned(
        self,
        micro_batch: JoinedMicroBatch,
        dy: dict[str, dict[str, torch.Tensor]],
        counts: Mapping[str, float],
    ) -> None:
        """Keep the gradients at what the model returned, of all that was trained on of the loop's own loss.

        `dy` has the gradients there of the loss and of each of its terms, and `counts` how often each counts.
        """
        for scalar, gradients in dy.items():
            for name, gradient in gradients.items():
                place = f"backward/{micro_batch.number}/returned.{name}"
                self.modules[place] = self.modules.get(place, 0.0) + counts[scalar] * gradient

    def _look_for_head(
        self,
        micro_batch: JoinedMicroBatch,
        computed: Computed,
        loss: float,
        number: float,
        calls: list[Entropy],
    ) -> None:
        """Find the logits of a model that returns its loss alone, and what the loss is then a mean over.

        They are those whose cross-entropy the loss is. A module returns them, or the model calls
        cross_entropy with them.
        """
        names = [name for name, x in self.modules.items() if name.startswith("forward/") and x.ndim > 1]
        of_head = mean_of(micro_batch, loss, self.modules[names[-1]], number) if names else computed.mean
        of_calls = mean_of_calls(micro_batch, loss, calls, number)
        if of_head.targets is not None:
            computed.mean, self.head = of_head, module_of(names[-1])
        elif of_calls.divisor:
            computed.mean, self.head = of_calls, CROSS_ENTROPY

    def _returned(self, micro_batch: JoinedMicroBatch, output: Any) -> dict[str, torch.Tensor]:
        """Return the tensors that the model returns, and those that it leaves in its modules and is trained on.

        Keeps what the run recorded of them because no module returned it.
        """
        returned, trained = (
            tensors_of(output),
            micro_batch.output_gradients.keys() | micro_batch.record.scalars.keys(),
        )
        recorded = self.recording.steps[self.step - 1][micro_batch.ranks[0]].places
        for name, tensor in returned.items():
            place = f"forward/{micro_batch.number}/returned.{name}"
            if place in recorded:
                self.keep(place, tensor)
        map_left(self.model, lambda name, x: returned.setdefault(name, x) if name in trained else x)
        return returned

    def _begin_backward(
        self, micro_batch: JoinedMicroBatch, returned: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Make the backward pass from the recorded gradients at what the model returned.

        Returns the tensor that they arrived at, if it is one, or chunks of one; else None.
        """
        if micro_batch.piece is not None:
            returned = {name: micro_batch.piece.cut(tensor) for name, tensor in returned.items()}
        micro_batch.add_zero_chunks(returned)
        grads = {
            name: like(gradient, returned[name]).to(returned[name].dtype)
            for name, gradient in micro_batch.output_gradients.items()
        }
        grads |= {
            name: returned[name].new_tensor(number) for name, number in micro_batch.record.scalars.items()
        }
        for name, gradient in grads.items():
            if gradient.shape != returned[name].shape:
                raise UserError(
                    f"what the model returns as {name} is of shape {tuple(gradient.shape)} in the run, and {tuple(returned[name].shape)} in one process, "
                    "so each rank is given a shard of it; return the whole, or a DTensor"
                )
        torch.autograd.backward([returned[name] for name in grads], list(grads.values()))
        return micro_batch.join_chunks([returned[name] for name in grads])

    @functools.cached_property
    def _trains_on_means(self) -> bool:
        """Whether the loop trains on means of log-probabilities.

        All recorded micro batches must look so. One may look so by chance, such as where all advantages are
        alike.
        """
        return all(
            trl_head.is_mean(micro_batch)
            for step in range(1, len(self.recording.steps) + 1)
            for micro_batch in self.recording.micro_batches(step)
            if LOG_PROBS in micro_batch.output_gradients
        )

    def _gradients_of_loss(
        self, micro_batch: JoinedMicroBatch, arrived: float, terms: dict[str, Term]
    ) -> Gradients:
        """Return the gradients of the loss alone, after a backward pass from the loss and from its further terms.

        The pass began with the gradients of the run there: `arrived` at the loss, and `beside` at each of the
        terms.
        """
        for name, gradient in micro_batch.direct_gradients.items() if self.loss is None else ():
            self.gradients.add(name, gradient.to(self._computed_in(name, gradient.dtype)))
        kept = self._arrived_gradients()
        if kept and not (self.gradients.are_finite and 0 < abs(arrived) < math.inf):
            why = "without any label, a mean is 0 / 0; leave it out of the recorded steps, or let the loss be a sum"
            if self.streamed:
                why += "; or a weight is used outside of its module, which needs more --memory"
            raise UserError(
                f"micro batch {micro_batch.number} of rank {micro_batch.ranks[0]} has no finite gradient in the reference: {why}"
            )

        further = list(terms.values())
        weights = torch.tensor([1.0, *(-term.beside for term in further)], dtype=torch.float64) / arrived
        return Sum(kept, [kept, *(term.gradients for term in further)], weights)

    def _arrived_gradients(self) -> Gradients:
        """Return the gradients that have arrived at parameters since they were taken last."""
        kept = self.gradients.take()
        return Lazy([name for name in self.parameters if name in kept], kept.__getitem__)

    def _terms(self, loss: torch.Tensor, scalars: dict[str, torch.Tensor], number: float) -> dict[str, Term]:
        """Return the further terms among the scalars, with their gradients. `number` is how many the loss is a sum over."""
        terms = {}
        for name, value in scalars.items():
            if value is loss or not value.requires_grad:
                continue
            others = [x for x in scalars.values() if x.requires_grad and x is not loss and x is not value]
            if others and name not in self.called.record.scalars:
                (gradient,) = torch.autograd.grad(others, value, retain_graph=True, allow_unused=True)
                # Another term is made of it, and it counts with that one.
                if gradient is not None:
                    continue
            (coefficient,) = torch.autograd.grad(loss, value, retain_graph=True, allow_unused=True)
            torch.autograd.backward(value, retain_graph=True)
            gradients = self._arrived_gradients()
            factor = 0.0 if coefficient is None else float(coefficient)
            terms[name] = Term(float(value.detach()), factor, gradients, number)
        parts = {name: term.coefficient * term.value for name, term in terms.items()}
        if parts and self.exact and math.isclose(sum(parts.values()), float(loss.detach()), rel_tol=SAME):
            # The loss is the sum of all that is returned beside it. The largest part is then the rest of the
            # loss, which the others are held against: in all micro batches that of the first.
            if self.rest_of_loss not in parts:
                self.rest_of_loss = max(parts, key=lambda name: abs(parts[name]))
            terms.pop(self.rest_of_loss)
        # The gradients that have arrived at modules are those of the terms, not of the loss.
        self._drop_backward()
        return terms

    def _drop_backward(self) -> None:
        for name in [name for name in self.modules if name.startswith("backward/")]:
            del self.modules[name]


def _require_labels_of_piece(micro_batch: JoinedMicroBatch) -> None:
    if micro_batch.piece is not None and micro_batch.piece.labels is None:
        raise UserError(
            f"the model is called with pieces of samples, and none of {', '.join(micro_batch.tensors)} is named as labels are, so the loss of a piece is not known; "
            "name them labels or targets"
        )
