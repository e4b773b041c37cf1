"""What a recorded model is asked to do: whether weights are tied, which token each position must give, and what its logits may depend on.

The reference computes as the model does, so a fault in what the model is given or sees is in both. These checks need no reference.
"""

import contextlib
import inspect
import math
from collections import Counter
from dataclasses import replace

import torch

from lockstep.ground.words import and_more
from lockstep.recorded import pieces
from lockstep.recorded.reference import Reference
from lockstep.recorder.called import Called
from lockstep.recorder.hashes import digest
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.computed import Computed
from lockstep.verdict.judgement import MULTIPLE
from lockstep.verdict.rows import StepVerdict, Wrong

DECODER = "decoder_"  # begins the names of the inputs of a decoder
SEEN = 1e-9  # relative: by so much float64 logits change, at least, if they depend on a token
MANY = 8  # different labels, which two micro batches do not have alike by chance
MOVED = 0.01  # of what a forward pass changes in a buffer, that may be missing
# By how many places the tokens that positions are trained to give are ahead
AHEAD = {0: ("itself", "labels are not shifted"), 2: ("after the next one", "labels are shifted twice")}


def judge(verdict: StepVerdict, reference: Reference, micro: list[Called], computed: list[Computed]) -> None:
    """Adds sentences to the verdict. `reference` is in float64; `computed` is what it gave for each micro batch."""
    _judge_ties(verdict, reference.model)
    tried: set[str] = set()
    for called, found in zip(micro, computed, strict=True):
        before = len(verdict.wrong)
        ids = _ids(reference.model, called, found)
        if ids is None:
            continue
        if called.piece is not None:
            pieces.judge(verdict, called, called.piece, called.tensors[ids], found)
        targets = found.mean.targets
        if targets is not None:  # logits may lie one below the other
            found.mean.targets = targets = targets.view_as(called.tensors[ids])
        if targets is not None and len(verdict.wrong) == before:
            _judge_targets(verdict, reference, called, ids, found)
        elif ids != "decoder_input_ids":  # a mask of the same shape may be the encoder's
            _judge_padding(verdict, called, ids)
        if len(verdict.wrong) == before:
            # Labels of which only the gradient tells may be of another task than the next token.
            _judge_sight(verdict, reference, called, ids, targets if found.mean.tokens else None, tried)
        if len(verdict.wrong) > before:
            return  # the other micro batches are made alike
    _judge_staleness(verdict, reference.model, micro, computed)


def _judge_staleness(
    verdict: StepVerdict, model: torch.nn.Module, micro: list[Called], computed: list[Computed]
) -> None:
    """Whether one micro batch has the labels of another."""
    known: dict[int, Called] = {}  # by labels: whose tokens they follow
    for called, found in zip(micro, computed, strict=True):
        labels, ids = called.tensors.get(found.mean.labels), _ids(model, called, found)
        targets = found.mean.targets
        if called.piece is not None or labels is None or ids is None or targets is None:
            continue
        if len(labels.unique()) < MANY:
            continue
        if _is_ahead(called.tensors[ids], targets.view_as(called.tensors[ids]), 1):
            known[digest(labels)] = called
        elif digest(labels) in known:
            other = known[digest(labels)]
            both = f"{other.number} of rank {other.ranks[0]} and {called.number} of rank {called.ranks[0]}"
            verdict.wrong.append(
                f"micro batches {both} have the same {found.mean.labels} and not the same {ids}: those of one are the other's"
            )
            return


def judge_replicas(verdict: StepVerdict, reference: Reference, micro: list[Called]) -> None:
    """Buffers and attributes may differ between replicas, as the averages of a batch norm do, where nothing in training depends on them."""
    firsts = [one for one in micro if one.number == 0 and one.piece is None]
    for first, other in zip(firsts, firsts[1:], strict=False):
        differ = reference.unlike(first, other)
        if not differ:
            continue
        own = dict(reference.outputs(first))
        instead = reference.outputs(first, like=other)
        name = next((name for name, one in own.items() if not torch.equal(one, instead[name])), None)
        if name is not None:
            verdict.wrong.append(
                f"{and_more(differ)} of ranks {first.ranks[0]} and {other.ranks[0]} differ, so they compute otherwise: first in {module_of(name)}"
            )
            return


def note_buffers(verdict: StepVerdict, called: Called, exact: Reference, near: Reference) -> None:
    """Notes what a forward pass leaves in buffers, as a batch norm its statistics, and the next one does not begin with.

    The passes over a micro batch in float64 and in the run's dtypes have just been made. Of rank 0, whose buffers DDP sends to the others.
    """
    recording, step, later = exact.recording, verdict.step, replace(called, number=called.number + 1)
    if later.number == len(recording.steps[step - 1][0].micro_batches):
        step, later.number = step + 1, 0
    if called.ranks[0] or step > len(recording.steps):
        return
    instead = (
        recording.buffers(verdict.step, called),
        recording.buffers(step, later),
        dict(near.model.named_buffers()),
    )
    odd = []
    for name, right in exact.model.named_buffers():
        if right.is_floating_point() and all(
            right.shape == getattr(one.get(name), "shape", 0) for one in instead
        ):
            change, error, noise = (float((one[name] - right).norm()) for one in instead)
            odd += [name] * (change > 0 and error > MOVED * change + MULTIPLE * noise)
    if odd:
        said = (
            f"the forward pass changes {and_more(odd)}, and the next one begins with other values: the loop changes them, too, "
            "or calls the model in training mode without gradients"
        )
        verdict.notes += [said] * (said not in verdict.notes)


def _judge_ties(verdict: StepVerdict, model: torch.nn.Module) -> None:
    """Models of transformers say which parameters are one."""
    for module in model.modules():
        ties = getattr(module, "_tied_weights_keys", None)
        if not isinstance(ties, dict) or not getattr(
            getattr(module, "config", None), "tie_word_embeddings", False
        ):
            continue
        own = dict(module.named_parameters(remove_duplicate=False))
        for one, other in ties.items():
            if one in own and other in own and own[one] is not own[other]:
                verdict.wrong.append(
                    f"{one} is not tied to {other}, though the model's configuration says so (tie_word_embeddings)"
                )
                return


def _ids(model: torch.nn.Module, called: Called, found: Computed) -> str | None:
    """The input with the tokens: the first of integers with two dims, those of the targets if there are any.

    Of an encoder and a decoder, that of the decoder: what the encoder sees may be what the decoder must give.
    """
    only = "decoder_input_ids" in inspect.signature(model.forward).parameters
    targets, labels = found.mean.targets, found.mean.labels
    own = called.tensors.get(labels)
    for name, tensor in called.tensors.items():
        if only and name != "decoder_input_ids":
            continue
        if (
            tensor.ndim == 2
            and (targets is None or targets.shape in (tensor.shape, (tensor.numel(),)))
            and name != labels
            and not tensor.is_floating_point()
            and tensor.dtype != torch.bool
        ):
            # The loss may take the tokens themselves for what they must give, which the model is given, too.
            of_tokens = own is not None and own.shape == tensor.shape and _is_ahead(own, tensor, 1)
            return labels if of_tokens else name
    return None


def _judge_targets(
    verdict: StepVerdict, reference: Reference, called: Called, name: str, found: Computed
) -> None:
    ids, targets = called.tensors[name], found.mean.targets
    assert targets is not None
    where = f"in micro batch {called.number} of rank {called.ranks[0]}"
    # Places may lie below each other, as of a recurrent network, whose samples are columns.
    both = ((ids, targets), (ids.T, targets.T))
    ahead = next((one for one in (1, *AHEAD) if any(_is_ahead(*each, one) for each in both)), 1)
    # A loss that the loop makes itself may be that of a model that sees a whole row, and gives it again.
    if ahead in AHEAD and (
        found.mean.labels or all(_is_causal(reference, called, name, along) for along in (0, 1))
    ):
        token, why = AHEAD[ahead]
        verdict.wrong.append(
            Wrong(f"each position is trained to give the token {token}", f": {why} ({where})")
        )
        return
    if _are_in_other_places(ids, targets) and _is_causal(reference, called, name, along=1):
        verdict.wrong.append(
            f"the labels are the next tokens, but of other positions: they are in another order, or of other rows ({where})"
        )
        return
    mask = _mask(called, name)
    if mask:
        trained = int(((targets >= 0) & _only_padding(called.tensors[mask])).sum())
        if trained:
            verdict.wrong.append(
                f"{trained} of {int((targets >= 0).sum())} tokens that count are padding, which {mask} leaves out ({where})"
            )


def _judge_padding(verdict: StepVerdict, called: Called, ids: str) -> None:
    """Where the loop makes a loss of its own, whatever it is, no gradient arrives at what the model returned for padding."""
    mask = _mask(called, ids)
    if not mask:
        return
    padding = _only_padding(called.tensors[mask])
    for name, gradient in called.arrived.items():
        if gradient.shape[:2] == padding.shape and gradient[padding].any():
            verdict.wrong.append(
                f"the loss depends on returned.{name} at padding, which {mask} leaves out (in micro batch {called.number} of rank {called.ranks[0]})"
            )
            return


def _only_padding(mask: torch.Tensor) -> torch.Tensor:
    """Where no token is and none follows: the last place of padding on the left may give the first token."""
    padding = mask == 0
    return padding & torch.cat([padding[:, 1:], padding[:, -1:]], 1)


def _mask(called: Called, name: str) -> str:
    """The input that says what is padding among the tokens `name`: attention_mask, or another one that leaves out one token alone; "" if none does.

    The mask of an encoder says nothing of a decoder's tokens.
    """
    ids, of_decoder = called.tensors[name], name.startswith(DECODER)
    masks = [
        name
        for name, one in called.tensors.items()
        if "mask" in name and one.shape == ids.shape and name.startswith(DECODER) == of_decoder
    ]
    if "attention_mask" in masks:
        return "attention_mask"
    return next((name for name in masks if len(ids[called.tensors[name] == 0].unique()) == 1), "")


def _is_ahead(ids: torch.Tensor, targets: torch.Tensor, ahead: int) -> bool:
    """Whether every target is the token so many places ahead."""
    targets = targets[:, : targets.shape[1] - ahead]
    counted = targets >= 0
    return bool(counted.any()) and torch.equal(targets[counted], ids[:, ahead:][counted].long())


def _are_in_other_places(ids: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the targets are the tokens after the first of each row, but in other places. The last of a row is not among these."""
    counted, after = targets[targets >= 0].tolist(), ids[:, 1:]
    missing = (Counter(counted) - Counter(after.flatten().tolist())).total()
    kinds = len({*counted})
    # By chance, about sqrt(tokens x kinds) are missing.
    if kinds < MANY or len(ids) > math.sqrt(len(counted) * kinds) / 4 or missing > len(ids):
        return False
    length = ids.shape[1]
    places = torch.arange(length)
    # A task of its own: to give again what was a few places before
    for ahead in range(1 - length, 0):
        there = ((places + ahead >= 0) & (places + ahead < length)).expand_as(ids) & (targets >= 0)
        moved = ids.roll(-ahead, 1)
        most = 2 * int(there.sum()) > len(counted)
        if most and torch.equal(targets[there], moved[there].long()):
            return False
    return 2 * int((targets[:, :-1] == after).sum()) < len(counted)


def _judge_sight(
    verdict: StepVerdict,
    reference: Reference,
    called: Called,
    ids: str,
    targets: torch.Tensor | None,
    tried: set[str],
) -> None:
    """Changes tokens that logits must not depend on, and looks whether these change. Each trial is done for one micro batch."""
    tokens = called.tensors[ids]
    trials = {name: trial for name, trial in _trials(called, tokens, targets).items() if name not in tried}
    if not trials:
        return
    tried.update(trials)
    right = reference.logits(called)
    if right is None or right.shape[:-1] != tokens.shape:  # such as of a classifier
        return
    for changed, looked_at, what in trials.values():
        change = _change(reference, called, ids, right, changed)
        if change is None:
            return
        off = change[looked_at]
        if (off > SEEN * right.abs().max()).any():
            verdict.wrong.append(
                f"{what} (in micro batch {called.number} of rank {called.ranks[0]}; by up to {float(off.max()):.2g})"
            )
            return


def _change(
    reference: Reference, called: Called, ids: str, right: torch.Tensor, changed: torch.Tensor
) -> torch.Tensor | None:
    """By how much each logit changes from `right` with other tokens at the places that are `changed`.

    None for a model that cannot be called with them, such as one in which as many tokens stand for an image as it has parts.
    """
    other = torch.where(changed, (called.tensors[ids] + 1) % right.shape[-1], called.tensors[ids])
    with contextlib.suppress(Exception):
        logits = reference.logits(replace(called, tensors={**called.tensors, ids: other}))
        return None if logits is None else (logits - right).abs()
    return None


def _is_causal(reference: Reference, called: Called, name: str, along: int) -> bool:
    """Whether the logits of the first half along a dim depend on no token of the second. Not known of a model that takes no other tokens."""
    ids, right = called.tensors[name], reference.logits(called)
    if right is None:
        return False
    later = (torch.arange(ids.shape[along]) >= ids.shape[along] // 2).unsqueeze(1 - along).expand_as(ids)
    change = _change(reference, called, name, right, later)
    if change is None:
        return False
    off = change.view(*ids.shape, -1)[~later]
    return not (off > SEEN * right.abs().max()).any()


def _trials(
    called: Called, tokens: torch.Tensor, targets: torch.Tensor | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor, str]]:
    """Name -> (which tokens are changed, where logits are looked at, what is wrong if these change)."""
    mask = called.tensors.get("attention_mask")
    nowhere = torch.zeros_like(tokens, dtype=torch.bool)
    masked = mask == 0 if mask is not None and mask.shape == tokens.shape else nowhere
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = {}
    if masked.any() and not masked.all():
        what = "the attention mask is not obeyed: logits depend on tokens that it leaves out"
        found["mask"] = (masked, ~masked, what)
    for name, first in _second_documents(called, masked).items():
        how = "restart" if name == "position_ids" else "change"
        row = int((first > 0).nonzero()[0])
        what = f"documents that are packed in a row see each other: logits behind position {int(first[row])}, where {name} {how}, depend on tokens before it"
        later = (places >= first[:, None]) & (first[:, None] > 0)
        found["documents"] = (places < first[:, None], later & ~masked, what)
    if targets is not None and _is_ahead(tokens, targets, 1):
        place = int((targets >= 0).nonzero()[:, 1].median())
        what = f"the logits depend on the tokens that they must give: those up to position {place} on later tokens"
        found["later"] = (places > place, (places <= place) & (targets >= 0), what)
    return found


def _second_documents(called: Called, masked: torch.Tensor) -> dict[str, torch.Tensor]:
    """The position of each row at which its second document begins, 0 if it has one alone, by the input that says so, if it says it."""
    found = {}
    for name, one in called.tensors.items():
        if one.shape != masked.shape or one.is_floating_point():
            continue
        if name == "position_ids":
            begins = (one[:, 1:] == 0) & (one[:, :-1] > 0)
        elif "doc" in name:
            begins = one[:, 1:] != one[:, :-1]
        else:
            continue
        begins &= ~masked[:, 1:] & ~masked[:, :-1]
        if begins.any():
            found[name] = torch.where(begins.any(1), begins.long().argmax(1) + 1, 0)
    return found
