"""Judge how the ranks of a recorded step called the model, without a reference: their samples, modes and random numbers."""

import itertools
from collections.abc import Sequence

import torch

from lockstep.ground.errors import UserError, printable
from lockstep.ground.words import and_more
from lockstep.recorder.micro_batch import JoinedMicroBatch, are_of_other_samples
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import StepVerdict


class Calls:
    """Judges the calls of a step, and adds sentences to the verdict. `micro` are the micro batches that count."""

    def __init__(self, recording: Recording, verdict: StepVerdict, micro: list[JoinedMicroBatch]):
        self.recording, self.verdict, self.micro = recording, verdict, micro
        self.ranks = recording.steps[verdict.step - 1]

    def judge_launch(self) -> None:
        """Judge whether several processes were started that make no process group."""
        first = self.ranks[0]
        if first.stage is None and first.launched > first.world_size == 1:
            self.verdict.wrong.append(
                f"{first.launched} processes were started, and the script made no process group (torch.distributed.init_process_group): each trains by itself"
            )

    def require_returned(self) -> None:
        """Raise UserError if a loss depends on more of the forward pass than the model returns: no reference knows how."""
        micro_batch = next((m for m in self.micro if m.record.around is not None), None)
        if micro_batch is not None:
            example = f", such as the output of {micro_batch.record.around}" * bool(micro_batch.record.around)
            raise UserError(
                f"the loss of micro batch {micro_batch.number} of rank {micro_batch.ranks[0]} uses tensors of the forward pass that the model does not return{example}: "
                "return them from forward, or let it keep them in an attribute of the module"
            )

    def note_losses(self) -> None:
        """Note what the loop gives a loss function that is hardly meant, though one process would compute the same."""
        odd = [(m, loss) for m in self.micro for loss in m.record.losses if loss.odd]
        if odd and self.verdict.step == 1:
            micro_batch, loss = odd[0]
            self.verdict.notes.append(
                f"{loss.function} {printable(loss.odd)} (in micro batch {micro_batch.number} of rank {micro_batch.ranks[0]})"
            )

    def note_scalars(self) -> None:
        """Note how often each scalar that the model returns counts in a loss that the loop makes of them.

        A scalar may also be none of its terms, such as a temperature.
        """
        of_loop = [micro_batch for micro_batch in self.micro if micro_batch.has_own_loss]
        counts_of = {
            name: [micro_batch.record.scalars.get(name, 0.0) for micro_batch in of_loop]
            for name in dict.fromkeys(name for micro_batch in of_loop for name in micro_batch.record.scalars)
        }
        if not counts_of or self.verdict.step > 1:
            return
        said = []
        for name, counts in counts_of.items():
            odd = next((number for number, count in enumerate(counts) if count != counts[0]), 0)
            one, other = (
                f"{counts[number]:.5g} in micro batch {of_loop[number].number} of rank {of_loop[number].ranks[0]}"
                for number in (0, odd)
            )
            said.append(f"{name} {f'{one} and {other}' if odd else f'{counts[0]:.5g}'}")
        self.verdict.notes.append(
            f"the loop's loss has this gradient at scalars that the model returns: {and_more(said)}"
        )

    def judge_unused(self, unused: list[JoinedMicroBatch]) -> None:
        """Judge the micro batches whose outputs no gradient arrived at.

        The first calls of the first step may be a trial, if all micro batches of the last recorded step
        count.
        """
        first = min(micro_batch.number for micro_batch in self.micro)
        later = self.recording.steps[1:]
        all_used = bool(later) and all(m.used for record in later[-1].values() for m in record.micro_batches)
        trials = [m for m in unused if all_used and self.verdict.step == 1 and m.number < first]
        if trials:
            number = len({micro_batch.number for micro_batch in trials})
            self.verdict.notes.append(
                f"the first {f'{number} calls of the model count' if number > 1 else 'call of the model counts'} for nothing: "
                "taken for a trial, as none in the last step does"
            )
        for micro_batch in unused:
            if micro_batch in trials or self._is_given_later(micro_batch):
                continue
            self.verdict.wrong.append(
                f"micro batch {micro_batch.number} of rank {micro_batch.ranks[0]} does not count: no gradient arrived at what the model returned for it"
            )

    def _is_given_later(self, micro_batch: JoinedMicroBatch) -> bool:
        """Whether the model is called later with what it returned here, as a discriminator with what a generator made.

        Only where optimizers take turns: in other loops, what is cut off there was to be trained on, such as
        an earlier piece of a sequence.
        """
        step = self.verdict.step
        if not self.recording.waiting(step):
            return False
        outputs = self.recording.of_modules(step, micro_batch)
        returned = [x for name, pairs in outputs.items() if name.startswith("forward/") for _, x in pairs]
        return any(
            tensor.is_floating_point() and tensor.dtype == output.dtype and torch.equal(tensor, output)
            for later in self.micro
            if later.number > micro_batch.number and later.ranks == micro_batch.ranks
            for tensor in later.tensors.values()
            for output in returned
        )

    def judge_modes(self) -> None:
        """Judge whether all micro batches are computed in one precision, and each module in one mode on all ranks."""
        used = {(rank, micro_batch.number) for micro_batch in self.micro for rank in micro_batch.ranks}
        first, *others = (
            (f"micro batch {number} of rank {rank}", self.ranks[rank].micro_batches[number].autocast)
            for rank, number in sorted(used)
        )
        other = next((pair for pair in others if pair[1] != first[1]), None)
        if other is not None:
            how, how_other = (
                "without autocast" if dtype is None else f"in {dtype}" for dtype in (first[1], other[1])
            )
            self.verdict.wrong.append(f"{first[0]} is computed {how}, {other[0]} {how_other}")
        # Of each rank and micro batch, the modules in evaluation mode
        by_rank = [[set(m.evaluated) for m in record.micro_batches] for record in self.ranks.values()]
        for number, modules in enumerate(zip(*by_rank, strict=False)):
            text = _on_some_ranks(modules, ": in evaluation mode on")
            if text:
                self.verdict.wrong.append(f"{text} alone (micro batch {number})")
                return
        if self.verdict.step == 1 and all("" in modules for of_rank in by_rank for modules in of_rank):
            self.verdict.notes.append(
                "the model is trained in evaluation mode, without dropout: if that is not meant, call model.train() before the loop"
            )

    def frozen_apart(self) -> bool:
        """Whether a parameter requires a gradient on some ranks alone."""
        text = _on_some_ranks([set(record.frozen) for record in self.ranks.values()])
        if text:
            self.verdict.wrong.append(f"gradients are required on some ranks alone: not that of {text} alone")
        return bool(text)

    def note_draws(self) -> None:
        """Note ranks that draw the same random numbers for different samples, as their generators have the same state."""
        states = {
            micro_batch.ranks[0]: micro_batch.generator_state
            for micro_batch in self.micro
            if micro_batch.generator_state is not None
            and micro_batch.number == 0
            and micro_batch.piece is None
        }
        pairs = (
            (rank, other)
            for rank, other in itertools.combinations(states, 2)
            if torch.equal(states[rank], states[other])
        )
        pair = next(pairs, None) if self.verdict.step == 1 else None
        if pair is not None:
            self.verdict.notes.append(
                f"ranks {pair[0]} and {pair[1]} draw the same random numbers, such as for dropout, since their generators have the same state"
            )

    def parted(self) -> bool:
        """Whether ranks that each have a part of a module's output were called with different micro batches."""
        for micro_batch in self.micro:
            parted = self.recording.parted(self.verdict.step, micro_batch)
            if parted:
                name, rank = parted
                self.verdict.wrong.append(
                    f"ranks {micro_batch.ranks[0]} and {rank} each have a part of what {name} returns, and were called with different micro batches {micro_batch.number}"
                )
                return True
        return False

    def judge_samples(self) -> None:
        """Judge whether data-parallel ranks see different samples.

        Ranks that hold the same weights, whole or the same shards, are data-parallel.
        """
        for one, other in itertools.combinations(self.micro, 2):
            if one.first is not other.first and one.has_inputs(other.tensors, other.record):
                if _are_views(one, other):
                    self.verdict.views = True
                    continue
                by_rows = bool(one.tensors) or one.ranks == other.ranks
                if are_of_other_samples(one.output_gradients, other.output_gradients, by_rows=by_rows):
                    self.verdict.shared_inputs = True
                    continue
                self.verdict.wrong.append(
                    f"micro batches {one.number} of rank {one.ranks[0]} and {other.number} of rank {other.ranks[0]} are the same samples"
                )
                return
        if self.verdict.shared_inputs:
            self.verdict.notes.append(
                "the model is called with the same for losses of different samples, as where it computes a whole graph: which samples these are is not judged"
            )
        shared = next((micro_batch for micro_batch in self.micro if len(micro_batch.ranks) > 1), None)
        if shared is None:
            return
        where = (
            f"ranks {', '.join(map(str, shared.ranks))} were called with the same micro batch {shared.number}"
        )
        why = self._why_undivided(shared)
        if why:
            self.verdict.wrong.append(f"{where}, though {why}")
        else:
            self.verdict.notes.append(f"{where}, so they are taken for ranks of a model-parallel group")

    def leave_the_rest(self) -> None:
        """Say if a part of a larger model was recorded. Raises UserError for one that is called twice with the same for a loss."""
        method = self.recording.tree.get("part_of")
        if not method:
            return
        whole, part = method.partition(".")[0], type(self.recording.skeleton).__name__
        pairs = itertools.combinations(self.micro, 2)
        if any(
            other.record.together
            and one.has_inputs(other.tensors, other.record)
            and not _are_views(one, other)
            for one, other in pairs
        ):
            raise UserError(
                f"the loop calls {method}, which calls {part} twice with the same, and not {whole} itself, so what it computes is not known; "
                f"let the forward method of {whole} call it, as DistributedDataParallel needs, too, and record again"
            )
        self.verdict.leave(
            f"{part} alone is judged, which {method} calls, as the loop does not call {whole} itself"
        )

    def drawn_apart(self) -> bool:
        """Whether replicas each drew their own random numbers for one micro batch.

        No reference has the numbers of both. The samples are not divided, which is judged.
        """
        is_drawn = any(
            micro_batch.generator_state is not None
            and len(micro_batch.ranks) > 1
            and self._why_undivided(micro_batch)
            for micro_batch in self.micro
        )
        if is_drawn:
            self.judge_samples()
        return is_drawn

    def _why_undivided(self, micro_batch: JoinedMicroBatch) -> str:
        """Return why the ranks of a micro batch should each have had another one; "" if they have parts of one model."""
        first, *others = micro_batch.ranks
        if set(others) & set(self.ranks[first].data_parallel):
            return "FSDP2 divides the samples among them"
        # By the places of shards: the first rank that has these
        owner: dict[str, int] = {}
        pairs = ((owner.setdefault(self.ranks[rank].shards, rank), rank) for rank in micro_batch.ranks)
        replicas = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if replicas is None:
            return ""
        return f"ranks {replicas[0]} and {replicas[1]} hold the same weights: the samples are not divided among the ranks"


def _are_views(one: JoinedMicroBatch, other: JoinedMicroBatch) -> bool:
    """Whether a loss is made of two calls with one batch that draw other random numbers, as for two masks of dropout."""
    states = [micro_batch.generator_state for micro_batch in (one, other)]
    draw_apart = states[0] is not None and states[1] is not None and not torch.equal(states[0], states[1])
    # On a GPU, the calls of dropout say so.
    draw_apart |= one.record.dropouts > 0 and other.record.dropouts > 0
    return draw_apart and one.ranks == other.ranks and other.record.together


def _on_some_ranks(by_rank: Sequence[set[str]], link: str = " on") -> str:
    """Return which names are in the sets of some ranks alone, and which ranks have the first of them; "" if none are.

    `by_rank` has the set of each rank. `link` is the text between the names and the ranks.
    """
    names = sorted(by_rank[0].union(*by_rank) - by_rank[0].intersection(*by_rank))
    ranks = ", ".join(str(rank) for rank, of_rank in enumerate(by_rank) if names and names[0] in of_rank)
    return f"{and_more(names)}{link} rank {ranks}" if names else ""
