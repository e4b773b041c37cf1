"""Loops by somebody who had not read the rules (record_strangers.py): correct ones pass, bugs are said, the rest is refused with the reason."""

import gc
import re

import pytest
import record_strangers
import torch
from listed import payload
from ranks import run_groups
from test_record_bugs import said, steps_of

import lockstep
from lockstep import judge
from lockstep.ground.errors import UserError
from lockstep.recorded.model_pass import ModelPass
from lockstep.recorder.recording import Recording

BY_ITSELF = "the loop's own loss gives it by itself is not judged"
NOT_JUDGED, NOT_SEEN = "; the loss itself is not judged", "; which labels the loss has was not seen"
NO_TARGETS = "; the targets of the loss are not judged"
RIGHT = {
    **dict.fromkeys(
        (
            "Own",
            "BesideTheLoss",
            "Pairs",
            "NoAdvantage",
            "ChangedInPlace",
            "Codebook",
            "TokensWeighed",
            "ThereAndBack",
            "TwoAlike",
            "KeepsItsArguments",
            "GradientOfABuffer",
        ),
        NOT_JUDGED,
    ),
    **dict.fromkeys(("Forces", "Double", "Slopes", "InBackwardTogether"), NOT_JUDGED),
    **dict.fromkeys(("SumOfTheModel", "SumAsItIs"), ""),
    **dict.fromkeys(("Contrast", "Clamped"), NO_TARGETS),
    "TiedInTheLoop": f"{NO_TARGETS}; the part of the gradient of table.weight that {BY_ITSELF}",
    **dict.fromkeys(
        ("Adversary", "Judged", "TwoOptimizers"),
        f"{NOT_JUDGED}; tensors of other models, whose optimizers step, too, are not judged: 2",
    ),
    "Beside": f"{NOT_JUDGED}; tensors that the optimizers hold and that are none of the model's are not judged: 1",
    **dict.fromkeys(("Closure", "TwoSchedules", "Nested", "NoRate", "ByHand"), NOT_JUDGED),
    **dict.fromkeys(
        ("OneHeadUnused", "Recurrent", "Stateful", "InADict", "Normalised", "StatisticsReset", "Padded"),
        NOT_SEEN,
    ),
    **dict.fromkeys(
        ("PartInDDP", "Sparse", "GivenAgain", "GivesColumnsAgain", "Chunked", "OddInput", "Hooked"), NOT_SEEN
    ),
    **dict.fromkeys(
        ("SharedOut", "InBackward", "CompiledStep", "ClippedByHand", "OfTasks", "SeveralMeshes", "Complex"),
        NOT_JUDGED,
    ),
    "AdversaryEachTime": f"{NOT_JUDGED}; tensors of other models, whose optimizers step, too, are not judged: 6",
    **dict.fromkeys(("MeanTeacher", "WholeGraph", "CastsForBlocks"), NOT_SEEN),
    **dict.fromkeys(("ReducedInBfloat16", "BlocksReducedInBfloat16"), NOT_SEEN),
    "Perturbed": f"{NOT_JUDGED}; tensors of other models, whose optimizers step, too, are not judged: 1",
    "Ahead": f"{NOT_JUDGED}; what Lookahead does to the weights after the step of AdamW is not judged",
    "LossAfterTheClip": f"{NOT_JUDGED}; the gradient of medians, which the loop's loss alone depends on, is not judged",
    "DrawnElsewhere": NOT_JUDGED,
    "PolicyOfEachModule": NOT_JUDGED,
    "NearOverflow": NOT_JUDGED,
    "KeepsNone": "",
    **dict.fromkeys(("Checkpointed", "Advantages", "GivesItsBias", "ScaledOwn", "Overflows"), NOT_JUDGED),
    **dict.fromkeys(
        ("ReducesItself", "OneLeftOut"),
        f"{NOT_JUDGED}; the update of Descent is not judged: one process cannot step it again (ValueError: Default process group has not been initialized, "
        "please make sure to call init_process_group.); it communicates",
    ),
    "ManyClosures": f"{NOT_JUDGED}; the update of LBFGS is not judged: it needs a closure, which calls the model again",
    **dict.fromkeys(("Entropy", "Scores"), NOT_JUDGED),
    **dict.fromkeys(
        (
            "OnShards",
            "ChannelsLast",
            "Bags",
            "Words",
            "Documents",
            "Bfloat16Clipped",
            "DroppedAsMeant",
            "CheckpointsDropout",
        ),
        NOT_SEEN,
    ),
    **dict.fromkeys(("ReducedInTheStep", "StepSkipped", "Annealed", "HookOnTheOutput"), NOT_JUDGED),
    "ClippedTogether": f"{NOT_JUDGED}; tensors that the optimizers hold and that are none of the model's are not judged: 1",
    **dict.fromkeys(
        ("CopiesWithGradients", "CopiesOfOnes"),
        f"{NOT_JUDGED}; the update is not judged: the optimizer holds none of the weights, which are overwritten afterwards, "
        "as from copies that it updates",
    ),
    **dict.fromkeys(
        ("WeightsOfTasks", "WeightsGiven"),
        f"{NOT_JUDGED}; the part of the gradient of sizes that {BY_ITSELF}",
    ),
    "HeadOfTheLoop": f"{NOT_JUDGED}; the part of the gradient of 0.weight that {BY_ITSELF}",
    "PenaltyOfWeights": f"{NOT_JUDGED}; the part of the gradient of body.bias and 5 more that {BY_ITSELF}",
    "ZerosFirst": f"; step 1 is not judged: nothing but zeros arrives at what the model returned{NOT_JUDGED}",
    "Denoised": "",
    **dict.fromkeys(
        (
            "Parts",
            "PositionBias",
            "LossModule",
            "ShiftedByTheLoop",
            "Labelled",
            "LabelledSum",
            "SumWithATerm",
            "PartBeside",
            "LossAlone",
            "HeadOfTheLoopSaid",
            "Distilled",
            "HeadsAsMeant",
        ),
        "",
    ),
}
WRONG = {
    "ClippedOnOneRank": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1 and 5 more; rank 0 clipped them, rank 1 did not",
    "ClippedByOwnNorm": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1 and 5 more; those of rank 1 are 1.2 times as large, so they were changed after they were reduced",
    "StepsTwice": "step 1: the optimizer steps 2 times with one gradient",
    "ClippedTooLate": "step 1: rank 0 clipped after the optimizer's step, so it has no effect",
    "RateByRank": "step 1: the optimizer's lr differs between ranks: 0.001, 0.002",
    "EvaluatedOnOneRank": "step 1: 1: in evaluation mode on rank 1 alone (micro batch 0)",
    "PartLeftOut": "step 1: balance, a term of the loss, does not count",
    "PartNotInDDP": "step 1: gradients differ between ranks that hold the same: head.weight on rank 1 and head.bias on rank 1; they were not reduced",
    "PartNotInDDPClipped": "step 1: gradients differ between ranks that hold the same: head.weight on rank 1 and head.bias on rank 1; they were not reduced",
    "ClippedEachTime": "step 1: rank 0 clipped after micro batch 0 of 3: the gradient was not complete",
    "EpsilonByRank": "step 1: 1.eps of ranks 0 and 1 differ, 1e-05 and 0.1, so they compute otherwise",
    "ScoresOfPadding": "step 1: the loss depends on returned.0 at padding, which mask leaves out (in micro batch 0 of rank 0)",
    "DocumentsMixedElsewhere": "step 1: documents that are packed in a row see each other: logits from position 4, where documents change, depend",
    "SparseApart": "step 1: gradients differ between ranks that hold the same: table.weight on rank 1; they were not reduced",
    "AutocastOnOneRank": "step 1: micro batch 0 of rank 0 is computed in torch.bfloat16, micro batch 0 of rank 1 without autocast",
    "AutocastOfTheLoop": "step 2: body computes with body.weight and body.bias from before the update of step 1, as where a copy or a cache is kept",
    "OneWeightCopied": "step 2: two computes with two.weight from before the update of step 1, as where a copy or a cache is kept",
    "ShiftedTwice": "step 1: each position is trained to give the token after the next one: labels are shifted twice",
    "ShiftedTwiceInColumns": "step 1: each position is trained to give the token after the next one: labels are shifted twice",
    "NotShifted": "step 1: each position is trained to give the token itself: labels are not shifted",
    "Kept": "step 1: a weighted sum of the micro batches' gradients leaves ",
    "BesideApart": "step 1: the optimizers hold a parameter that is none of the recorded model's, is the same on all ranks, and has another gradient",
    "OtherSamples": "step 1: gradients differ between ranks that hold the same: 0.weight on rank 1; ranks 0 and 1 have parts of one model",
    "Noisy": "step 1: a weighted sum of the micro batches' gradients leaves ",
    "LabelledTwice": "step 1: the gradient is 2 times that of the mean over all tokens of the global batch, which is the world size",
    "LabelledAllPositions": "step 1: the gradient is 0.875 times that of the mean over all tokens of the global batch, "
    "which is the tokens of the global batch / the positions of the global batch",
    "DistilledThrice": "step 1: kl, a term of the loss, counts 3 times as often as the rest",
    "ReducesMost": "step 1: weights differ after the update between ranks that hold the same: body.weight on rank 1 and body.bias on rank 1",
    "OneRanksGradient": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1 and 5 more; they were not reduced",
    "SharedOutNotSent": "step 2: weights differ between ranks that hold the same: ",
    "ClippedInBackward": "step 1: rank 0 clipped after the optimizer's step, so it has no effect",
    "NeverUnscaled": "step 1: the gradient is 256 times that of what follows from the gradients at the logits, averaged over the ranks, "
    "which is the scale of the GradScaler; it was not taken off, as scaler.step(optimizer) does",
    "Reordered": "step 1: 2 of 6 gradients are too far from the reference, most of all ",
    "Compressed": "step 1: all elements of the gradient are numbers of torch.float16, though it is computed in float32: it was rounded after",
    "CompressedScaled": "step 1: all elements of the gradient are numbers of torch.float16, though it is computed in float32: it was rounded after",
    "OtherSamplesOnShards": "step 1: gradients differ between ranks that hold the same: ",
    "NoisyHook": "step 1: forward/body (micro batch ",
    "Signs": "step 1: a weighted sum of the micro batches' gradients leaves ",
    "FusedLoss": "step 1: if twice the gradient arrives at what the model returns, gradients of parameters are not twice as large",
    "FrozenBefore": "step 1: last.weight has no gradient on rank 0, though the loss depends on it",
    "ZeroedInTheStep": "step 1: body.weight has no gradient on rank 0, though the loss depends on it",
    "WindowsLost": "step 1: before each step, gradients are clipped and then set to zero: the micro batches before count for nothing",
    "ClippedTogetherOff": "step 1: the gradient was clipped by a norm of ",
    "AnnealedApart": "step 2: weight of ranks 0 and 1 differ, so they compute otherwise: first in returned.0",
    "CodebookApart": "step 2: codes of ranks 0 and 1 differ, so they compute otherwise: first in ",
    "PaddingCounts": "step 1: 6 of 28 tokens that count are padding, which mask leaves out (in micro batch 0 of rank 0)",
    "DocumentsMixed": "step 1: documents that are packed in a row see each other: logits from position 4, where documents change, depend on",
    "VectorsHalved": "step 1: the gradient of 0.bias and 3 more is 0.5 times that of the mean over all tokens of the global batch, "
    "which is 1 / the world size",
    "NormsTooSmall": "step 1: 2 of 6 gradients are too far from the reference, most of all 1.",
    "OneNotZeroed": "step 2: the gradient of 3.weight and 3.bias has 1 times that of step 1 in it: it was not set to zero",
    "SharedOutNotReduced": "step 1: 3 of 6 gradients are too far from the reference, most of all ",
    "HeadNotReduced": "step 1: gradients differ between ranks that hold the same: two.weight on rank 1 and two.bias on rank 1; they were not reduced",
    "OwnShardsClipped": "step 1: shards of the gradient have a norm of 0.1 on each rank, so each was clipped by the norm of its own",
    "LabelledByTheMost": "step 1: the gradient is 0.92105",
    "DividedByTheMask": "step 1: the gradient is 0.82608",
    "AdversaryEachTimeSummed": "step 1: the gradient is 2 times that of what follows from the gradients at the logits, averaged over the ranks",
    "ReducedInBfloat16ByHand": "step 1: ",
    "BlocksReducedInBfloat16Scaled": "step 1: 2 of 7 gradients are too far from the reference",
    "DrawnOnOneRank": "step 1: forward/layers.0 (micro batch ",
    "KeepsKeys": "step 1: the model keeps keys and values, and then computes otherwise, as transformers does not look for documents",
    "Late": "step 2: the gradient is 1 times that of step 1, and has nothing of its own micro batches: it comes one step late",
    "OverflowsOnOneRank": "step 1: GradScalers skipped 0, 1 steps on the ranks before this one: each looks at its own gradients alone",
    "SkippedOnOneRank": "step 1: ranks skipped 0, 1 steps before this one: each sets gradients to zero, after clipping, for itself",
    "ScaledOnOneRank": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1 and 5 more; "
    "those of rank 1 are 1.5 times as large, so they were changed after they were reduced",
    "OneScaledThenClipped": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1; "
    "those of rank 1 are 1.5 times as large, so they were changed after they were reduced",
    "CutOnOneRank": "step 1: gradients differ between ranks that hold the same: two.weight on rank 1; "
    "most elements are the same on ranks 0 and 1, so they were changed after they were reduced",
    "ZeroOnOneRank": "step 1: gradients differ between ranks that hold the same: two.weight on rank 1; on rank 1 they are zero",
    "ReducedFirstAlone": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1 and 5 more; "
    "they were not reduced over ranks 0 and 1, or not all of them; on rank 1, the micro batches count 0.5, 0, 0 (rank 0); 0.5, 1, 1 (rank 1)",
    "BoundByRank": "step 1: gradients differ between ranks that hold the same: body.weight on rank 1 and 5 more; "
    "they were clipped to different norms, 0.05 and 0.02",
    "BesideApartClipped": "step 1: the optimizers hold a parameter that is none of the recorded model's, is the same on all ranks",
    "OneCopyLeft": "step 1: one.bias is not overwritten after the update, though other weights are, from the copies",
    "ZerosOnOneRank": "step 1: two.weight has a gradient, of zeros, on some ranks, and none on rank 0: its optimizer does not step it",
    "HookOnAWeight": "step 1: 1 of 6 gradients is too far from the reference, one.weight: ",
    "RowsNotSummed": "step 1: forward/3 (micro batch ",
    "AdapterByRank": "step 1: gradients are required on some ranks alone: not that of 0.bias and 3 more on rank 0",
    "LabelledByTheClasses": "step 1: the gradient is 0.142857",
    "LabelledByTheLast": "step 1: the gradient is ",
    "HeadOfTheLoopTwice": "step 1: 1 of 3 gradients is too far from the reference, 0.weight: ",
    "HeadOfTheLoopTimes": "step 1: the gradient is 3 times that of the mean of the micro batches' losses, which is the micro batches of a rank",
    "PartBesideApart": "step 1: gradients differ between ranks that hold the same: scale.weight on rank 1; they were not reduced",
    "LossAloneMixed": "step 1: documents that are packed in a row see each other: logits from position 4",
    "LossAloneNotShifted": "step 1: each position is trained to give the token itself: labels are not shifted",
    "SumWithATermThrice": "step 1: z, a term of the loss, counts 3 times as often as the rest",
    "CheckpointDropsOthers": "step 1: backward/body.1 (micro batch ",
    "WeighedNotShifted": "step 1: each position is trained to give the token itself: labels are not shifted",
    "DroppedApart": "step 1: ranks 0, 1 were called with the same micro batch 0, though ranks 0 and 1 hold the same weights",
    "NotQuiteBack": "step 2: body.bias and 4 more changed between the update of step 1 and step 2",
    "RestByItsLabels": "step 1: first head, a term of the loss, counts 2.1 times as often as the rest",
    "ChunkedOfOneRank": "step 1: the gradient is 1.666667 times that of the mean over all tokens of the global batch",
    "KeepsItsArgumentsScaled": "step 1: 1 of 6 gradients is too far from the reference, one.weight: ",
    "GradientOfABufferScaled": "step 1: 1 of 6 gradients is too far from the reference, one.weight: ",
    "SumAveraged": "step 1: the gradient is ",
    "SumOfTheModelHalved": "step 1: the gradient is 0.5 times that of the mean over all tokens of the global batch, which is 1 / the world size",
    "CastsForBlocksScaled": "step 1: 2 of ",
    "PolicyOfEachModuleRounded": "step 1: 4 of 19 tensors are not what their modules compute from their recorded inputs: gradient/head.weight, ",
    "PlacesScaled": "step 1: forward/places (micro batch 0, rank 0) is the first of ",
    "NotAllClipped": "step 1: 3 of 7 parameters with a gradient were clipped, and not one.bias",
    "AheadOverwrites": "step 2: two.weight changed between the update of step 1 and step 2",
    "ClippedTooEarly": "step 1: 6 of 7 parameters with a gradient were clipped, and not medians",
    "AheadScaled": "step 1: 1 of 6 gradients is too far from the reference, one.weight: ",
    "SameNodes": "step 1: ranks 0, 1 were called with the same micro batch 0, though ranks 0 and 1 hold the same weights",
    "SameNodesAgain": "step 1: micro batches 0 of rank 0 and 1 of rank 0 are the same samples",
    "HeadTimesWorld": "step 1: first head, a term of the loss, counts 2 times as often as the rest, which is the world size",
}
REFUSED = {
    "OwnExperts": "ranks 0 and 1 have different parameters, such as experts.0.bias: neither has the whole model, which one process would need",
    "Copies": "no parameter has a gradient other than zero, and the optimizer holds 6 tensors that are none of the model's",
    "Zeros": "no gradient other than zero arises in the recorded steps",
    "Penalty": "is differentiated again (create_graph=True), as by a gradient penalty",
    "NoLabels": "micro batch 0 of rank 0 has no finite gradient in the reference",
    "ShardReturned": "what the model returns as 0 is of shape (4, 2) in the run, and (4, 4) in one process, so each rank is given a shard of it",
    "LossFails": "--loss: KeyError: 'labels'; the recorded tensors are values, one, two, and lockstep.record.batch(...) adds others",
    "TermApart": "--loss: the loss is not computed from first head, so how often it counts is not known; return the tensor itself that is added",
    "LossIsNone": "--loss: the function must return a scalar tensor",
}


@pytest.fixture(scope="module")
def judged(new_folder):
    folder = new_folder("strangers")
    # A copy shows in the second step, and HeadTimesWorld is judged as a right loop, too.
    two = [*RIGHT, *REFUSED, "OneCopyLeft", "HeadTimesWorld"]
    steps = steps_of(WRONG) | dict.fromkeys(two, 2)
    run_groups([(2, "record_strangers:run", folder, steps)], timeout=1600)
    return folder


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_pass(judged, name):
    status, lines = said(judged / name)
    verdict = re.sub("; the gradient is that of .* times as much", "", lines[-1])
    assert status == 0 and verdict == f"PASS: 2 steps{RIGHT[name]}", lines


@pytest.mark.parametrize("name", WRONG)
def test_bugs_are_said(judged, name):
    status, lines = said(judged / name)
    assert status == 1 and lines[-1].startswith(f"FAIL: {WRONG[name]}"), lines


def test_what_a_gradient_is_times_is_said(judged):
    """By its distance or by its factor, whichever is farther off on this processor."""
    for name in ("KeepsItsArgumentsScaled", "GradientOfABufferScaled"):
        assert " is 1.5 times " in said(judged / name)[1][-1]
    counts = "times that of the mean over all tokens of the global batch, which is 1 / the classes"
    assert counts in said(judged / "LabelledByTheClasses")[1][-1]


def test_counts_of_tokens_are_known(judged):
    of_all = "which is the tokens of the global batch / "
    by_rank = "(the tokens of the first rank x the ranks or the tokens of the rank with the most x the ranks)"
    assert of_all + by_rank in said(judged / "LabelledByTheMost")[1][-1]
    assert of_all + "the tokens of the mask" in said(judged / "DividedByTheMask")[1][-1]
    last = "which is the tokens of the global batch / the tokens of the last micro batches"
    assert last in said(judged / "LabelledByTheLast")[1][-1]
    assert "tokens of the mask" not in said(judged / "LabelledByTheMost")[1][-1]


def test_a_small_whole_number_may_be_none_of_the_run(judged):
    """Two ranks: a head that counts twice may have a weight of two. Negative controls: a factor that comes later, and one of 15 / 19."""
    note = "; it may also be a number in the loss"
    for name in ("LabelledTwice", "HeadTimesWorld", "LabelledByTheClasses"):
        assert said(judged / name)[1][-1].endswith(note)
    for name in ("VectorsHalved", "LabelledByTheMost", "NeverUnscaled"):
        assert note not in said(judged / name)[1][-1]


def test_what_did_not_move_is_named(judged):
    note = "note: the update did not change two.bias, which has a gradient"
    assert any(note in line for line in said(judged / "OneLeftOut")[1])
    assert not any("did not change" in line for line in said(judged / "ReducesItself")[1])


def test_the_page_names_the_gradient_that_differs(judged):
    """Clipping by norms that differ makes all others differ, too. The first rank's copy is right if what the gradient is a mean over is known.

    Negative control: gradients that are not reduced, each near enough to a sum that is none.
    """

    def copies(name):
        (view,) = [one for one in payload(judged / name / "report.html")["views"] if one["first"]]
        found = {tensor: right for step, tensor, *_, right in view["differing"] if step == 1}
        return view["first"][:2], {
            tensor: one for tensor, one in found.items() if tensor.startswith("gradient")
        }

    scaled = "gradient/body.weight"
    assert copies("OneScaledThenClipped") == ([1, scaled], {scaled: True})
    first, found = copies("ReducedFirstAlone")
    assert first == [1, "gradient/body.weight"] and len(found) == 6 and not any(found.values())


def test_buffers_that_the_loop_changes_are_named(judged):
    note = "note: the forward pass changes 1."
    assert any(note in line for line in said(judged / "StatisticsReset")[1])
    assert not any(note in line for line in said(judged / "Normalised")[1])


def test_steps_that_a_scaler_skips_are_named(judged):
    """Each is a step of the run. Negative control: none is skipped."""
    note = "note: steps that a GradScaler skipped before this one, as gradients were not finite: 1"
    lines = said(judged / "Overflows")[1]
    assert sum(note in line for line in lines) == 1 and "whole run: 3 steps, 72 samples" in lines
    assert not any("skipped" in line for line in said(judged / "ScaledOwn")[1])


def test_a_hook_on_a_weight_is_named(judged):
    note = "register_hook has put a hook on it"
    assert note in said(judged / "HookOnAWeight")[1][-1] and note not in said(judged / "CutOnOneRank")[1][-1]


def test_a_hook_is_named(judged):
    """Whether it is a bug or meant, the reference does not have it."""
    note = "a forward hook changes what body returns, and the reference has no hooks"
    assert any(note in line for line in said(judged / "NoisyHook")[1])
    assert not any("hook" in line for line in said(judged / "Own")[1])


def test_ranks_that_share_out_an_output_have_one_micro_batch(judged):
    """Whether their gradients agree or not: no reference can be given parts of two."""
    said_of_it = (
        "ranks 0 and 1 each have a part of what 1 returns, and were called with different micro batches 0"
    )
    assert any(said_of_it in line for line in said(judged / "OtherSamples")[1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(judged, name):
    status, lines = said(judged / name)
    assert status == 2 and lines == [lines[0]] and REFUSED[name] in lines[0], lines


def test_the_loss_says_what_was_not_judged(judged, capsys):
    """Without it, a factor that is there before the gradient at the logits is not seen; with it, it is."""
    assert judge.main([str(judged / "HeadTimesWorld")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"PASS: 2 steps{NOT_JUDGED}"
    assert judge.main([str(judged / "HeadTimesWorld"), "--loss", f"{record_strangers.__file__}:none"]) == 2
    assert "has no function or class none" in capsys.readouterr().err


def test_units_draw_the_same_numbers_again(judged):
    assert judge.main([str(judged / "DrawnElsewhere"), "--memory", "1e-9"]) == 0
    assert judge.main([str(judged / "DrawnOnOneRank"), "--memory", "1e-9"]) == 1


def test_forward_mode_needs_scripted_functions(judged):
    """Those of torch itself. The ranks have loaded them before they judge."""
    assert judge.main([str(judged / "Slopes")]) == 0


def living_models() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in (ModelPass, record_strangers.Heads)]


def test_the_models_of_a_step_are_freed(judged):
    """A hook that has the model which it hangs on would keep it, and the next step needs the memory."""
    # Other tests of this process may have left some in cycles.
    gc.collect()
    before = living_models()
    assert judge.main([str(judged / "Own")]) == 0
    assert not [one for one in living_models() if not any(one is other for other in before)]


def test_noted_tensors_are_no_inputs(judged, tmp_path):
    for called in Recording(judged / "Labelled").micro_batches(1):
        assert list(called.tensors) == ["input", "labels"] and called.record.inputs == ["input"]
    net = torch.nn.Linear(2, 2)
    with lockstep.record(net, tmp_path), pytest.raises(UserError, match="the model is called with it"):
        lockstep.record.batch(input=torch.ones(1))
        net(torch.ones(2))
