"""What a recorded model is asked to do.

The checks are whether weights are tied, which token each position must give, and what the logits may depend on. The
reference computes as the model does, so a fault in what the model is given or sees is in both. These checks need no
reference.
"""

import contextlib
import inspect
import math
from collections import Counter
from dataclasses import replace

import torch

from lockstep.ground.words import and_more
from lockstep.recorded import pieces
from lockstep.recorded.model_pass import ModelPass
from lockstep.recorder.hashes import digest
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.computed import Computed
from lockstep.verdict.judgement import MULTIPLE
from lockstep.verdict.rows import StepVerdict, Wrong

DECODER = "decoder_"  # names of the inputs of a decoder begin so
# Relative: float64 logits that depend on a token change by at least this much with it.
SEEN = 1e-9
MANY = 8  # different labels, which two micro batches do not have in common by chance
# The next pass may lack this share of what a forward pass changes in a buffer.
MOVED = 0.01
# By how many places targets are ahead of their positions: which token that is, and why it is wrong
AHEAD = {0: ("itself", "labels are not shifted"), 2: ("after the next one", "labels are shifted twice")}


def shape_targets(model: torch.nn.Module, micro: list[JoinedMicroBatch], computed: list[Computed]) -> None:
    """Give targets the dims of the tokens, as logits may be flattened over batch and sequence, and count their samples."""
    for micro_batch, result in zip(micro, computed, strict=True):
        name, targets = _ids_name(model, micro_batch, result), result.mean.targets
        if targets is None:
            continue
        if name is not None:
            ids = micro_batch.tensors[name]
            result.mean.targets = targets = targets.view_as(ids)
            # Samples may be columns, as those of a recurrent network.
            are_columns = not _is_ahead(ids, targets, 1) and _is_ahead(ids.T, targets.T, 1)
            result.mean.samples = targets.shape[are_columns]
        elif targets.ndim > 1:
            result.mean.samples = len(targets)


def judge(
    verdict: StepVerdict, reference: ModelPass, micro: list[JoinedMicroBatch], computed: list[Computed]
) -> None:
    """Add sentences to the verdict. `reference` is in float64; `computed` is what it gave for each micro batch."""
    _judge_ties(verdict, reference.model)
    tried: set[str] = set()
    for micro_batch, result in zip(micro, computed, strict=True):
        wrong_before = len(verdict.wrong)
        name = _ids_name(reference.model, micro_batch, result)
        if name is None:
            continue
        if micro_batch.piece is not None:
            pieces.judge(verdict, micro_batch, micro_batch.piece, micro_batch.tensors[name], result)
        targets = result.mean.targets
        if targets is not None and len(verdict.wrong) == wrong_before:
            _judge_targets(verdict, reference, micro_batch, name, result)
        elif name != "decoder_input_ids":  # a mask of the same shape may be the encoder's
            _judge_padding(verdict, micro_batch, name)
        if len(verdict.wrong) == wrong_before:
            # Labels that only the gradient shows may be of another task than the next token.
            _judge_leaks(
                verdict, reference, micro_batch, name, targets if result.mean.tokens else None, tried
            )
        if len(verdict.wrong) > wrong_before:
            return  # the other micro batches are made alike
    _judge_staleness(verdict, reference.model, micro, computed)


def _judge_staleness(
    verdict: StepVerdict, model: torch.nn.Module, micro: list[JoinedMicroBatch], computed: list[Computed]
) -> None:
    """Judge whether one micro batch has the labels of another."""
    # By the hash of labels: the micro batch whose tokens they follow
    known: dict[int, JoinedMicroBatch] = {}
    for micro_batch, result in zip(micro, computed, strict=True):
        labels, name = micro_batch.tensors.get(result.mean.labels), _ids_name(model, micro_batch, result)
        targets = result.mean.targets
        if micro_batch.piece is not None or labels is None or name is None or targets is None:
            continue
        if len(labels.unique()) < MANY:
            continue
        if _is_ahead(micro_batch.tensors[name], targets.view_as(micro_batch.tensors[name]), 1):
            known[digest(labels)] = micro_batch
        elif digest(labels) in known:
            owner = known[digest(labels)]
            both = f"{owner.number} of rank {owner.ranks[0]} and {micro_batch.number} of rank {micro_batch.ranks[0]}"
            verdict.wrong.append(
                f"micro batches {both} have the same {result.mean.labels} and not the same {name}: those of one are the other's"
            )
            return


def judge_replicas(verdict: StepVerdict, reference: ModelPass, micro: list[JoinedMicroBatch]) -> None:
    """Judge whether replicas compute alike.

    Their buffers and attributes may differ where nothing in training depends on them, such as a batch norm's averages.
    """
    replicas = [micro_batch for micro_batch in micro if micro_batch.number == 0 and micro_batch.piece is None]
    for first, other in zip(replicas, replicas[1:], strict=False):
        differing = reference.unlike(first, other)
        if not differing:
            continue
        outputs = dict(reference.outputs(first))
        theirs = reference.outputs(first, like=other)
        name = next((name for name, tensor in outputs.items() if not torch.equal(tensor, theirs[name])), None)
        if name is not None:
            verdict.wrong.append(
                f"{and_more(differing)} of ranks {first.ranks[0]} and {other.ranks[0]} differ, so they compute otherwise: first in {module_of(name)}"
            )
            return


def note_buffers(
    verdict: StepVerdict, micro_batch: JoinedMicroBatch, reference: ModelPass, yardstick: ModelPass
) -> None:
    """Note buffers, such as a batch norm's statistics, if the next pass does not begin with what a forward pass leaves.

    `reference` and `yardstick` have just computed the micro batch. Only rank 0 is looked at: DDP sends its buffers to the others.
    """
    recording, step, later = (
        reference.recording,
        verdict.step,
        replace(micro_batch, number=micro_batch.number + 1),
    )
    if later.number == len(recording.steps[step - 1][0].micro_batches):
        step, later.number = step + 1, 0
    if micro_batch.ranks[0] or step > len(recording.steps):
        return
    # Before this pass, before the next one, and after this pass of the yardstick
    states = (
        recording.buffers(verdict.step, micro_batch),
        recording.buffers(step, later),
        dict(yardstick.model.named_buffers()),
    )
    names = []
    for name, expected in reference.model.named_buffers():
        if expected.is_floating_point() and all(
            expected.shape == getattr(buffers.get(name), "shape", 0) for buffers in states
        ):
            change, error, noise = (float((buffers[name] - expected).norm()) for buffers in states)
            names += [name] * (change > 0 and error > MOVED * change + MULTIPLE * noise)
    if names:
        message = (
            f"the forward pass changes {and_more(names)}, and the next one begins with other values: the loop changes them, too, "
            "or calls the model in training mode without gradients"
        )
        verdict.notes += [message] * (message not in verdict.notes)


def _judge_ties(verdict: StepVerdict, model: torch.nn.Module) -> None:
    """Judge whether parameters that the configuration of a transformers model ties are one."""
    for module in model.modules():
        ties = getattr(module, "_tied_weights_keys", None)
        if not isinstance(ties, dict) or not getattr(
            getattr(module, "config", None), "tie_word_embeddings", False
        ):
            continue
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, source in ties.items():
            if name in parameters and source in parameters and parameters[name] is not parameters[source]:
                verdict.wrong.append(
                    f"{name} is not tied to {source}, though the model's configuration says so (tie_word_embeddings)"
                )
                return


def _ids_name(model: torch.nn.Module, micro_batch: JoinedMicroBatch, result: Computed) -> str | None:
    """Return the name of the input with the tokens: the first of integers with two dims.

    It has the targets' dims, if there are targets. Of an encoder and a decoder, it is the decoder's: what the encoder
    sees may be what the decoder must give.
    """
    has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
    targets, labels_name = result.mean.targets, result.mean.labels
    labels = micro_batch.tensors.get(labels_name)
    for name, tensor in micro_batch.tensors.items():
        if has_decoder and name != "decoder_input_ids":
            continue
        if (
            tensor.ndim == 2
            and (targets is None or targets.shape in (tensor.shape, (tensor.numel(),)))
            and name != labels_name
            and "mask" not in name
            and not tensor.is_floating_point()
            and tensor.dtype != torch.bool
        ):
            # The loss may shift the tokens themselves for its targets, though the model is given the targets, too.
            are_tokens = labels is not None and labels.shape == tensor.shape and _is_ahead(labels, tensor, 1)
            return labels_name if are_tokens else name
    return None


def _judge_targets(
    verdict: StepVerdict, reference: ModelPass, micro_batch: JoinedMicroBatch, name: str, result: Computed
) -> None:
    """Judge whether each position is trained to give the next token, and padding none.

    `name` is that of the input with the tokens.
    """
    ids, targets = micro_batch.tensors[name], result.mean.targets
    assert targets is not None
    place = f"in micro batch {micro_batch.number} of rank {micro_batch.ranks[0]}"
    # Samples may be columns, as those of a recurrent network.
    pairs = ((ids, targets), (ids.T, targets.T))
    ahead = next((places for places in (1, *AHEAD) if any(_is_ahead(*pair, places) for pair in pairs)), 1)
    # A loss that the loop makes itself may be that of a model that sees a whole row, and gives it again.
    if ahead in AHEAD and (
        result.mean.labels or all(_is_causal(reference, micro_batch, name, dim) for dim in (0, 1))
    ):
        token, why = AHEAD[ahead]
        verdict.wrong.append(
            Wrong(f"each position is trained to give the token {token}", f": {why} ({place})")
        )
        return
    if _are_in_other_places(ids, targets) and _is_causal(reference, micro_batch, name, along=1):
        verdict.wrong.append(
            f"the labels are the next tokens, but of other positions: they are in another order, or of other rows ({place})"
        )
        return
    mask, number = _mask(micro_batch, name), int((targets >= 0).sum())
    padding = int(((targets >= 0) & _only_padding(micro_batch.tensors[mask])).sum()) if mask else 0
    filler = _filler(ids, targets)
    if padding:
        verdict.wrong.append(
            f"{padding} of {number} tokens that count are padding, which {mask} leaves out ({place})"
        )
    elif filler is not None:
        label, count = filler
        verdict.wrong.append(
            f"{count} of {number} tokens that count have the label {label}, which is not the next token, as of a prompt or of padding that -100 should leave out ({place})"
        )


def _judge_padding(verdict: StepVerdict, micro_batch: JoinedMicroBatch, ids: str) -> None:
    """Judge whether the loop's own loss, whatever it is, sends a gradient to what the model returned for padding.

    `ids` is the name of the input with the tokens.
    """
    mask = _mask(micro_batch, ids)
    if not mask:
        return
    padding = _only_padding(micro_batch.tensors[mask])
    for name, gradient in micro_batch.output_gradients.items():
        if gradient.shape[:2] == padding.shape and gradient[padding].any():
            verdict.wrong.append(
                f"the loss depends on returned.{name} at padding, which {mask} leaves out (in micro batch {micro_batch.number} of rank {micro_batch.ranks[0]})"
            )
            return


def _only_padding(mask: torch.Tensor) -> torch.Tensor:
    """Return where there is padding that no token follows.

    The last place of padding on the left may give the first token.
    """
    padding = mask == 0
    return padding & torch.cat([padding[:, 1:], padding[:, -1:]], 1)


def _mask(micro_batch: JoinedMicroBatch, name: str) -> str:
    """Return the name of the input that says what is padding among the tokens of the input `name`; "" if none does.

    That is attention_mask, or another one that leaves out a single token id. The mask of an encoder says nothing of a
    decoder's tokens.
    """
    ids, is_of_decoder = micro_batch.tensors[name], name.startswith(DECODER)
    masks = [
        key
        for key, tensor in micro_batch.tensors.items()
        if "mask" in key and tensor.shape == ids.shape and key.startswith(DECODER) == is_of_decoder
    ]
    if "attention_mask" in masks:
        return "attention_mask"
    return next((mask for mask in masks if len(ids[micro_batch.tensors[mask] == 0].unique()) == 1), "")


def _is_ahead(ids: torch.Tensor, targets: torch.Tensor, ahead: int) -> bool:
    """Whether there are targets, and each is the token that is `ahead` places later."""
    targets = targets[:, : targets.shape[1] - ahead]
    is_counted = targets >= 0
    return bool(is_counted.any()) and torch.equal(targets[is_counted], ids[:, ahead:][is_counted].long())


def _filler(ids: torch.Tensor, targets: torch.Tensor) -> tuple[int, int] | None:
    """Return the one label of all tokens that count and do not have the next token for a label, and their number; None if there is none.

    Such tokens follow each other. After a row or a document, a single one may have a label of its own, such as an end that the
    tokens lack.
    """
    counted, following = targets[:, :-1], ids[:, 1:]
    are_other = (counted >= 0) & (counted != following)
    labels = counted[are_other].unique().tolist()
    follow_each_other = bool((are_other[:, 1:] & are_other[:, :-1]).any())
    kinds = counted[(counted >= 0) & ~are_other].unique()
    is_filler = len(labels) == 1 and follow_each_other and len(kinds) >= MANY
    return (labels[0], int(are_other.sum())) if is_filler else None


def _are_in_other_places(ids: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the targets are the tokens after the first of each row, but in other places.

    The last of a row is not among these.
    """
    counted, following = targets[targets >= 0].tolist(), ids[:, 1:]
    missing = (Counter(counted) - Counter(following.flatten().tolist())).total()
    kinds = len({*counted})
    # By chance, about sqrt(tokens x kinds) are missing.
    if kinds < MANY or len(ids) > math.sqrt(len(counted) * kinds) / 4 or missing > len(ids):
        return False
    length = ids.shape[1]
    positions = torch.arange(length)
    # A task of its own: to give again what was a few places before
    for ahead in range(1 - length, 0):
        has_source = ((positions + ahead >= 0) & (positions + ahead < length)).expand_as(ids) & (targets >= 0)
        sources = ids.roll(-ahead, 1)
        are_most = 2 * int(has_source.sum()) > len(counted)
        if are_most and torch.equal(targets[has_source], sources[has_source].long()):
            return False
    return 2 * int((targets[:, :-1] == following).sum()) < len(counted)


def _judge_leaks(
    verdict: StepVerdict,
    reference: ModelPass,
    micro_batch: JoinedMicroBatch,
    ids: str,
    targets: torch.Tensor | None,
    tried: set[str],
) -> None:
    """Change tokens that logits must not depend on, and judge whether the logits change.

    `ids` is the name of the input with the tokens. Each trial is done for one micro batch: `tried` has the names of those
    that were done, and gets those of this micro batch.
    """
    tokens = micro_batch.tensors[ids]
    trials = {
        name: trial for name, trial in _trials(micro_batch, tokens, targets).items() if name not in tried
    }
    if not trials:
        return
    tried.update(trials)
    original = reference.logits(micro_batch)
    if original is None or original.shape[:-1] != tokens.shape:  # such as of a classifier
        return
    for changed, looked_at, message in trials.values():
        change = _change(reference, micro_batch, ids, original, changed)
        if change is None:
            return
        unwanted = change[looked_at]
        if (unwanted > SEEN * original.abs().max()).any():
            verdict.wrong.append(
                f"{message} (in micro batch {micro_batch.number} of rank {micro_batch.ranks[0]}; by up to {float(unwanted.max()):.2g})"
            )
            return


def _change(
    reference: ModelPass,
    micro_batch: JoinedMicroBatch,
    ids: str,
    original: torch.Tensor,
    changed: torch.Tensor,
) -> torch.Tensor | None:
    """Return by how much each logit changes from `original` with other tokens at the places that are `changed`.

    None for a model that cannot be called with them, such as one in which an image has a token for each of its parts.
    """
    tokens = torch.where(
        changed, (micro_batch.tensors[ids] + 1) % original.shape[-1], micro_batch.tensors[ids]
    )
    with contextlib.suppress(Exception):
        logits = reference.logits(replace(micro_batch, tensors={**micro_batch.tensors, ids: tokens}))
        return None if logits is None else (logits - original).abs()
    return None


def _is_causal(reference: ModelPass, micro_batch: JoinedMicroBatch, name: str, along: int) -> bool:
    """Whether the logits of the first half along a dim depend on no token of the second.

    False if it is not known, as of a model that takes no other tokens. `name` is that of the input with the tokens.
    """
    ids, original = micro_batch.tensors[name], reference.logits(micro_batch)
    if original is None:
        return False
    later = (torch.arange(ids.shape[along]) >= ids.shape[along] // 2).unsqueeze(1 - along).expand_as(ids)
    change = _change(reference, micro_batch, name, original, later)
    if change is None:
        return False
    unwanted = change.view(*ids.shape, -1)[~later]
    return not (unwanted > SEEN * original.abs().max()).any()


def _trials(
    micro_batch: JoinedMicroBatch, tokens: torch.Tensor, targets: torch.Tensor | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor, str]]:
    """Return trials by name: (which tokens are changed, where logits are looked at, what is wrong if they change)."""
    mask = micro_batch.tensors.get("attention_mask")
    nowhere = torch.zeros_like(tokens, dtype=torch.bool)
    masked = mask == 0 if mask is not None and mask.shape == tokens.shape else nowhere
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    trials = {}
    if masked.any() and not masked.all():
        message = "the attention mask is not obeyed: logits depend on tokens that it leaves out"
        trials["mask"] = (masked, ~masked, message)
    for name, begins in _second_documents(micro_batch, masked).items():
        verb = "restart" if name == "position_ids" else "change"
        row = int((begins > 0).nonzero()[0])
        message = f"documents that are packed in a row see each other: logits from position {int(begins[row])}, where {name} {verb}, depend on tokens before it"
        later = (positions >= begins[:, None]) & (begins[:, None] > 0)
        trials[f"documents of {name}"] = (positions < begins[:, None], later & ~masked, message)
    if targets is not None and _is_ahead(tokens, targets, 1):
        position = int((targets >= 0).nonzero()[:, 1].median())
        message = f"the logits depend on the tokens that they must give: those up to position {position} on later tokens"
        trials["later"] = (positions > position, (positions <= position) & (targets >= 0), message)
    return trials


def _second_documents(micro_batch: JoinedMicroBatch, masked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return where the second document of each row begins, by the name of an input that says so; 0 in a row of one."""
    documents = {}
    for name, tensor in micro_batch.tensors.items():
        if tensor.shape != masked.shape or tensor.is_floating_point():
            continue
        if name == "position_ids":
            is_first = (tensor[:, 1:] == 0) & (tensor[:, :-1] > 0)
        elif "doc" in name:
            is_first = tensor[:, 1:] != tensor[:, :-1]
        else:
            continue
        is_first &= ~masked[:, 1:] & ~masked[:, :-1]
        if is_first.any():
            documents[name] = torch.where(is_first.any(1), is_first.long().argmax(1) + 1, 0)
    return documents
