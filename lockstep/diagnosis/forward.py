"""Rules for a wrong batch and for a first wrong tensor in the forward pass.

A rule is a function of a Case that returns a cause, or None. Its docstring says what is wrong if it names the cause. It does so only
on convincing evidence: a value that was recomputed from the dump and is what the run has.
"""

import torch

from lockstep.diagnosis import attention, evidence, exchanged, modules, recompute
from lockstep.diagnosis.case import MOMENTS, Case, describe
from lockstep.verdict.result import Cause

SHOWN = 0.01  # radians, at least, of an angle whose cosine shows it


def batch(case: Case) -> Cause:
    """The batch is not the right one. It has no tolerance: a batch is equal or wrong."""
    return Cause("data", _how_wrong(case))


def _how_wrong(case: Case) -> str:
    """Return in what way a batch is wrong, in words."""
    dp = case.mesh.num_sample_shares
    own, reference = case.own(case.first), case.reference(case.first)
    own_of, reference_of = own.chunk(dp), reference.chunk(dp)
    peers = [rank for rank in case.odd_ranks(case.first) if case.mesh.coordinates(rank).tp]
    if peers:
        return f"tensor-parallel peers were given different batches: ranks {peers} differ"
    if case.first == "batch/attention_mask":
        for side, own_part, reference_part in (
            ("before", own[:, 1:], reference[:, :-1]),
            ("after", own[:, :-1], reference[:, 1:]),
        ):
            if torch.equal(own_part, reference_part):
                return f"the attention mask at each position is that of the position {side} it"
        return "ids and labels are right, the attention mask is not"
    if case.first == "batch/position_ids":
        is_consecutive = torch.equal(own, torch.arange(own.shape[1]).double().expand_as(own))
        sentence = "the positions of documents do not begin again"
        return sentence if is_consecutive else "ids and labels are right, the positions are not"
    pairs = [
        (a, b) for a in range(dp) for b in range(dp) if a != b and torch.equal(own_of[a], reference_of[b])
    ]
    if pairs:
        labels = [tensor_of("batch/labels").chunk(dp) for tensor_of in (case.own, case.reference)]
        are_samples = case.first == "batch/input_ids" and torch.equal(
            labels[0][pairs[0][0]], labels[1][pairs[0][1]]
        )
        what = "samples" if are_samples else case.first.removeprefix("batch/").replace("_", " ")
        return f"DP rank {pairs[0][0]} was given the {what} of DP rank {pairs[0][1]}" + " alone" * (
            not are_samples
        )
    if case.first == "batch/labels":
        return "the input ids are right, the labels are not"
    batches = [
        torch.cat([tensor_of("batch/input_ids"), tensor_of("batch/labels")], dim=1).tolist()
        for tensor_of in (case.own, case.reference)
    ]
    if sorted(batches[0]) == sorted(batches[1]):
        return "the right samples in another order"
    if sorted(own.tolist()) == sorted(reference.tolist()) and not case.is_wrong("batch/labels"):
        return "the input ids are in another order of samples than their labels, which are right"
    rows = zip(own.tolist(), reference.tolist(), strict=True)
    if all(set(own_tokens) <= set(exact_tokens) for own_tokens, exact_tokens in rows):
        return "each sample has its own tokens only, but not each where it belongs"
    return "the samples are not those of this step"


def dropout(case: Case) -> Cause | None:
    """Scattered elements are zero and the others larger to make up for it, as with dropout."""
    fraction = evidence.dropped_elements(case.own(case.first), case.reference(case.first))
    if fraction is None:
        return None
    replicas = ", not the same on all ranks that hold it" if case.odd_ranks(case.first) else ""
    what = describe(case.path)
    return Cause(
        "random numbers",
        f"{100 * fraction:.1f} % of the elements of {what} are zero, scattered, and the others larger to make up for it{replicas}: dropout",
    )


def other_weights(case: Case) -> Cause | None:
    """The module computed with a wrong weight or bias.

    The weights before the step are not captured. But if the moments are right and the updated weight is not, by more than a factor of its
    change, the weight was wrong before, or what the module computed with was written back.
    """
    for kind in ("weight", "bias"):
        name = (case.weight_of(case.path) if kind == "weight" else None) or f"{case.path}.{kind}"
        key = f"parameter/{name}"
        if key not in case.rows:
            continue
        if _was_wrong(case, name):
            error = f"{case.rows[key].distance.relative:.1e}"
            sentence = f"the module computed with another {name}: it is off by a relative {error} after the step, and its moments are right"
            sentence += case.unjudged_replicas([key])
            num_wrong = sum(_was_wrong(case, p) or _differed(case, p) for p in case.dump.layout.parameters)
            if num_wrong > 1:
                sentence += f"; {num_wrong - 1} more weights are off or differ between ranks"
            is_wrong = (case.own(key) - case.right(key)).abs() > case.rows[key].tolerated_largest
            return Cause("weights", "; ".join([sentence, *case.in_one_share(key, is_wrong, case.mesh.axes)]))
        if _differed(case, name):
            return Cause(
                "weights",
                f"ranks {case.odd_ranks(key)} hold another {name} than other ranks, with equal gradient and moments: "
                "it differed before the step",
            )
    return None


def _update_inputs(parameter: str) -> list[str]:
    """Return the names of the gradient and the moments that a parameter is updated from."""
    return [f"gradient/{parameter}", f"exp_avg/{parameter}", f"exp_avg_sq/{parameter}"]


def _was_wrong(case: Case, parameter: str) -> bool:
    """Whether a parameter was wrong before the step.

    It was if the updated one is wrong, its moments are right, and its change is no multiple of the right one.
    """
    key = f"parameter/{parameter}"
    return (
        case.is_wrong(key)
        and case.factor([case.rows[key]]) is None
        and not any(map(case.is_wrong, _update_inputs(parameter)[1:]))
    )


def _differed(case: Case, parameter: str) -> bool:
    """Whether replicas of a parameter differed before the step.

    They did if they differ after it, and those of its gradient and moments do not.
    """
    return bool(case.odd_ranks(f"parameter/{parameter}")) and not any(
        map(case.odd_ranks, _update_inputs(parameter))
    )


def rotary_frequencies(case: Case) -> Cause | None:
    """The cosines or sines of rotary angles are those of other frequencies at the right positions."""
    own, right = case.own(case.first), case.right(case.first)
    if case.dump.layout.sources.get(case.path) != () or own.ndim != 3 or own.shape[1] < 2:
        return None
    inverse = torch.acos if bool((right[:, 0] == 1).all()) else torch.asin
    if inverse is torch.asin and bool(right[:, 0].any()):
        return None
    function, positions = (
        (torch.cos if inverse is torch.acos else torch.sin),
        torch.arange(own.shape[1])[:, None],
    )
    frequencies, right_frequencies = (inverse(tensor[:1, 1:2].clamp(-1, 1)) for tensor in (own, right))
    known = {
        "rounded to bfloat16": right_frequencies.float().bfloat16().double(),
        "rounded to float16": right_frequencies.float().half().double(),
    }
    for words, rounded in known.items():
        if case.explains(case.first, function(positions * rounded).expand_as(own)):
            return Cause(
                "precision", f"{describe(case.path)} has frequencies that are {words}, as recomputed"
            )
    times = evidence.multiple_of(frequencies, right_frequencies)
    if case.explains(case.first, function(times * positions * right_frequencies).expand_as(own)):
        return Cause(
            "rotary angles", f"{describe(case.path)} has {times:.4g} times the right angles, as recomputed"
        )
    # theta^(-2 i / dim): all logarithms are one multiple. The cosine of a small angle is 1 in float32.
    shown = (frequencies > SHOWN) & (right_frequencies > SHOWN)
    power = evidence.multiple_of(frequencies[shown].log(), right_frequencies[shown].log())
    architecture = case.dump.run["architecture"]
    theta = architecture.get("rope_theta") or (architecture.get("rope_parameters") or {}).get("rope_theta")
    if theta and case.explains(case.first, function(positions * right_frequencies**power).expand_as(own)):
        return Cause(
            "rotary angles",
            f"{describe(case.path)} has the angles of a theta of {theta**power:.4g}, not {theta:g}, as recomputed",
        )
    return None


def rounded(case: Case) -> Cause | None:
    """Every element of the wrong tensors is a bfloat16 or a float16 number, in a run that computes them in float32.

    In autocast, only moments and parameters are: gradients are float32 sums of bfloat16 products.
    """
    kind = case.first.partition("/")[0]
    names = [case.first] if kind == "forward" else [row.name for row in case.wrong(kind)]
    is_update = kind in ("parameter", *MOMENTS)
    is_float32 = case.options["precision"] in (("fp32", "autocast") if is_update else ("fp32",))
    if kind == "forward":
        is_float32 &= case.entry["tensors"][case.first]["dtype"] == "F32"
    dtype = evidence.rounded_to((case.own(name), case.right(name)) for name in names) if is_float32 else ""
    if not dtype:
        return None
    what = describe(case.path) if kind == "forward" else f"{len(names)} {kind}s"
    run = "" if is_update else ", in a float32 run"
    return Cause("precision", f"every element of {what} is a {dtype} number{run}")


def one_share_alone(case: Case, sentence: str) -> Cause:
    """Return the cause if every element is one tp rank's share of a sum. Without the sum, each rank would have its own."""
    if case.odd_ranks(case.first):
        return Cause("tp reduction missing", sentence)
    return Cause(
        "share lost", f"{sentence}; all tp ranks have the same, so the others' shares are lost before the sum"
    )


def sum_over_tp(case: Case) -> Cause | None:
    """The output of a layer that sums over tp is one rank's share, on each or on all ranks, or has the sum or only its bias tp times."""
    module, tp = case.path, case.mesh.tp
    shares = recompute.forward_shares(case, module)
    if not shares:
        return None
    has_bias = f"{module}.bias" in case.dump.layout.parameters
    bias = case.before(f"{module}.bias") if has_bias else torch.zeros(())
    for rank, share in enumerate(shares):
        if any(case.explains(case.first, share + added) for added in (bias, 0 * bias)):
            sentence = (
                f"{describe(module)} is tp rank {rank}'s share alone, computed again from input and weights"
            )
            return one_share_alone(case, sentence)
    # Each rank keeps its own positions of the sum
    if "tp" in case.sharded(case.first) and case.mesh.cp == 1:
        pieces = [share.chunk(tp, 1)[rank] for rank, share in enumerate(shares)]
        if case.explains(case.first, torch.cat(pieces, 1)):
            return Cause(
                "tp reduction missing",
                f"{describe(module)} is, at each tp rank's positions, that rank's share alone, computed again from input and weights",
            )
    # A factor that is another number as well does not say that a reduction is repeated.
    if case.names_of(tp) == ["tp"] and case.explains(case.first, tp * case.reference(case.first)):
        return Cause(
            "tp reduction repeated",
            f"{describe(module)}, a sum over tp, is {tp} = tp times what it should be",
        )
    if has_bias and case.explains(case.first, case.reference(case.first) + (tp - 1) * bias):
        return Cause("tp reduction repeated", f"{module} adds its bias once per tp rank")
    return None


def scaled(case: Case) -> Cause | None:
    """An output is a multiple of the right one."""
    factor = case.factor([case.rows[case.first]])
    if not factor:
        return None
    return Cause("output scale", f"{describe(case.path)} is {case.in_words(factor)} times what it should be")


BATCH_RULES = (batch,)
FORWARD_RULES = (
    dropout,
    attention.another_way,
    attention.documents_together,
    other_weights,
    rounded,
    modules.another_way,
    rotary_frequencies,
    sum_over_tp,
    exchanged.outputs_exchanged,
    exchanged.other_rows,
    scaled,
)
