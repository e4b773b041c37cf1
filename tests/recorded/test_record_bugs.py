"""Bugs of users' loops (record_bugs.py), each caught for its own reason, placed, and named or said to be unexplained; correct variants pass."""

import json
import math

import pytest
import record_bugs
from ranks import run_groups

BEGINS = "; it is there when the backward pass begins"
LATER = "; the backward pass begins without it, so it comes in later, as in the reduction of gradients"
TOKENS = "that of the mean over all tokens of the global batch"
MEANS = "that of the mean of the micro batches' means"
STEPS = "that of the mean of the micro steps' means, each over the tokens of all ranks"
DP = "the world size or the number of data-parallel ranks"
ONE_OF_DP = "1 / the world size or 1 / the number of data-parallel ranks"
GROUPS = "the number of data-parallel ranks or the ranks that see the same samples"
ALL = "gradients differ between ranks that hold the same: model.embed_tokens.weight on rank 1 and 13 more"
SHARED = "gradients differ between ranks that hold the same: model.embed_tokens.weight on rank 1 and 10 more"
OWN_SHARDS = "each rank's shards are of its own samples alone: they were not reduced"
UNREDUCED = "they were not reduced over ranks 0 and 1, or not all of them"
MEAN = ": each rank has its own, and their mean is right"
NAMED, UNEXPLAINED = True, False
NORM = "gradient/model.norm.weight"

# Loop: (what the verdict says first, whether this names the cause, what else was found, where others had it: owner/repository/number).
# What else: the factor; the gradients that are too far, and no others; a sentence beside the first.
BUGS = {
    "TimesWorld": (
        f"step 1: the gradient is 2 times {TOKENS}, which is {DP}{BEGINS}",
        NAMED,
        2.0,
        "huggingface/transformers/45994",
    ),
    "NotTimesWorld": (
        f"step 1: the gradient is 0.5 times {TOKENS}, which is {ONE_OF_DP}{BEGINS}",
        NAMED,
        0.5,
        "meta-pytorch/torchtune/2172",
    ),
    "AccumulationForgotten": (
        f"step 1: the gradient is 3 times {MEANS}, which is the micro batches of a rank{BEGINS}",
        NAMED,
        3.0,
        "openai/guided-diffusion/111",
    ),
    "LossAveragedByHand": (
        f"step 1: the gradient is 0.5 times {MEANS}, which is {ONE_OF_DP}{BEGINS}",
        NAMED,
        0.5,
        "",
    ),
    "SumOfTokens": (
        f"step 1: the gradient is 135 times {TOKENS}, which is the tokens of the global batch / ({DP}){BEGINS}",
        NAMED,
        135.0,
        "pytorch/torchtitan/2972",
    ),
    "SummedNotAveraged": (f"step 1: the gradient is 2 times {MEANS}, which is {DP}{LATER}", NAMED, 2.0, ""),
    "AveragedTwice": (
        f"step 1: the gradient is 0.5 times {MEANS}, which is {ONE_OF_DP}{LATER}",
        NAMED,
        0.5,
        "",
    ),
    "StepsAfterEach": (
        f"step 1: the gradient is 0.5 times that of the mean of the ranks' token means, which is {ONE_OF_DP}{BEGINS}; a loss that is divided by 2 micro batches has it, too, where the optimizer steps after each",
        NAMED,
        0.5,
        "",
    ),
    "LossScaleKept": (f"step 1: the gradient is 1024 times {MEANS}{BEGINS}", UNEXPLAINED, 1024.0, ""),
    "LossRoundedToBf16": (
        f"step 1: the gradient is 1.001953 times {MEANS}{BEGINS}",
        UNEXPLAINED,
        1 + 2**-9,
        "",
    ),
    "MicroMeansUnwanted": (
        "step 1: the gradient is that of the mean of the micro batches' means, not of the mean over all tokens",
        NAMED,
        1.0,
        "huggingface/transformers/24725",
    ),
    "RankMeans": (
        "step 1: the gradient is that of the mean of the ranks' token means, not of the mean over all tokens",
        NAMED,
        1.0,
        "huggingface/transformers/34373",
    ),
    "MicroStepMeansUnwanted": (
        f"step 1: the gradient is {STEPS}, not of the mean over all tokens",
        NAMED,
        1.0,
        None,
    ),
    "AllPositions": (
        f"step 1: the gradient is 0.703125 times {TOKENS}, which is the tokens of the global batch / the positions of the global batch{BEGINS}",
        NAMED,
        270 / 384,
        "EleutherAI/gpt-neo/45",
    ),
    "CountBeforeShift": (
        f"step 1: the gradient is 0.96875 times {TOKENS}, which is the tokens of the global batch / "
        f"(the positions of the global batch or the labels of the global batch before they are shifted){BEGINS}",
        NAMED,
        31 / 32,
        "",
    ),
    "CountOfShiftedRows": (
        f"step 1: the gradient is 0.9574468 times {TOKENS}, which is the tokens of the global batch / "
        "(the tokens of the global batch and one more for each row or the tokens of the first rank x the ranks or the tokens of the rank with the most x the ranks)"
        f"{BEGINS}",
        NAMED,
        270 / 282,
        "",
    ),
    "CountOfOneMicroBatch": (
        f"step 1: the gradient is 3 times {STEPS}, which is the micro batches of a rank{BEGINS}; it may also be a number in the loss",
        NAMED,
        3.0,
        "verl-project/verl/3332",
    ),
    "CountOfTheLast": (
        f"step 1: the gradient is 1.216216 times {TOKENS}{BEGINS}",
        UNEXPLAINED,
        270 / 222,
        "",
    ),
    "LastWindow": (
        f"step 2: the gradient is 0.6666667 times {MEANS}, which is ({DP} or the micro batches of a rank) / the micro batches of another step{BEGINS}",
        NAMED,
        2 / 3,
        "huggingface/transformers/38872",
    ),
    "OneRankTwice": (
        "step 1: the micro batches count 0.3333, 0.3333, 0.3333 (rank 0); 0.1667, 0.1667, 0.1667 (rank 1), which is no known mean",
        UNEXPLAINED,
        None,
        "",
    ),
    "ZeroedTooEarly": (
        "step 1: the micro batches count 0, 0, 0.1667 (rank 0); 0, 0, 0.1667 (rank 1), which is no known mean",
        UNEXPLAINED,
        None,
        "bytetriper/RAE/67",
    ),
    "NeverZeroed": (
        "step 2: the gradient has 1 times that of step 1 in it: it was not set to zero",
        NAMED,
        None,
        "WalkingMeatAxolotl/AnimaLoraStudio/305",
    ),
    "LastNotSynced": (
        f"step 1: {ALL}; {UNREDUCED}{MEAN}",
        NAMED,
        "the micro batches count 0.1667, 0.3333, 0.3333 (rank 0); 0.1667, 0, 0 (rank 1)",
        "karpathy/build-nanogpt/30",
    ),
    "OneNoSyncTooLong": (
        f"step 1: {ALL}; {UNREDUCED}{MEAN}",
        NAMED,
        "the micro batches count 0.3333, 0.3333, 0.3333 (rank 0); 0, 0, 0 (rank 1)",
        "karpathy/build-nanogpt/30",
    ),
    "CalledInside": (
        f"step 1: {ALL}; {UNREDUCED}{MEAN}",
        NAMED,
        "the micro batches count 0.3333, 0.3333, 0.3333 (rank 0); 0, 0, 0 (rank 1)",
        "rosinality/swapping-autoencoder-pytorch/22",
    ),
    "LayerNotReduced": (
        f"step 1: gradients differ between ranks that hold the same: model.norm.weight on rank 1; {UNREDUCED}{MEAN}",
        NAMED,
        {NORM},
        "",
    ),
    "LastWithoutBackward": (
        "step 1: micro batch 2 of rank 0 does not count: no gradient arrived at what the model returned for it",
        NAMED,
        2 / 3,
        "",
    ),
    "GradientsRounded": (
        "step 1: all elements of the gradient are numbers of torch.bfloat16, though it is computed in float32",
        NAMED,
        None,
        "",
    ),
    "CompressedInAutocast": (
        "step 1: all elements of the gradient are numbers of torch.bfloat16, though it is kept in float32: it was rounded after",
        NAMED,
        None,
        "",
    ),
    "GradientsRoundedAndClipped": (
        "step 1: all elements of the gradient are numbers of torch.float16, though it is computed in float32",
        NAMED,
        None,
        "",
    ),
    "FrozenByZeroing": (
        "step 1: 1 of 14 gradients is too far from the reference, model.norm.weight",
        UNEXPLAINED,
        {NORM},
        "",
    ),
    "FrozenButDecayed": (
        "step 1: model.norm.weight requires no gradient, but the update changed it",
        NAMED,
        set(),
        "facebookresearch/fairseq/4702",
    ),
    "FrozenLater": (
        "step 2: model.norm.weight requires no gradient, but the update changed it",
        NAMED,
        set(),
        "ahrefs/ocannl/673",
    ),
    "ClippedBeforeReduction": (
        "step 1: rank 0 clipped by a norm of ",
        NAMED,
        "at least one of them is not that of the whole gradient",
        "",
    ),
    "ClippedScaled": (
        "step 1: the gradient was clipped by a norm of ",
        NAMED,
        "; it was clipped before scaler.unscale_(optimizer)",
        "pytorch/examples/1196",
    ),
    "ClippedGroup": (
        "step 1: 12 of 14 parameters with a gradient were clipped, and not model.embed_tokens.weight",
        NAMED,
        None,
        "",
    ),
    "ClippedInEachPass": (
        "step 1: rank 0 clipped after micro batch 0 of 3: the gradient was not complete",
        NAMED,
        None,
        "huggingface/accelerate/641",
    ),
    "AllBfloat16Scaled": (
        "step 1: 1 of 26 gradients is too far from the reference, model.layers.1.self_attn.q_proj.weight: all of it is 1.06",
        UNEXPLAINED,
        {"gradient/model.layers.1.self_attn.q_proj.weight"},
        "",
    ),
    "ShardsNotReduced": (
        f"step 1: a weighted sum of the micro batches' gradients leaves 0.71 of a typical gradient, which is no known mean (nearest: 0.9926 x {STEPS[8:]}); {OWN_SHARDS}",
        NAMED,
        None,
        "pytorch/torchtitan/577",
    ),
    "ShardsOfALayer": (
        "step 1: 12 of 14 gradients are too far from the reference, most of all model.layers.0.",
        UNEXPLAINED,
        OWN_SHARDS,
        "pytorch/torchtitan/577",
    ),
    "ShardsOfOneRank": (
        f"step 1: a weighted sum of the micro batches' gradients leaves 0.32 of a typical gradient, which is no known mean (nearest: 0.7359 x {MEANS[8:]}); "
        "in the shards of rank 0, the micro batches count 0.1667, 0.1667, 0.1667 (rank 0); 0.1667, 0.1667, 0.1667 (rank 1); "
        "in the shards of rank 1, the micro batches count 0.08333, 0.08333, 0.08333 (rank 0); 0.08333, 0.08333, 0.08333 (rank 1)",
        NAMED,
        None,
        "",
    ),
    "ClippedByShard": (
        "step 1: rank 0 clipped by a norm of ",
        NAMED,
        "at least one of them is not that of the whole gradient",
        "areal-project/AReaL/312",
    ),
    "MadeBeforeSharding": (
        "step 1: no optimizer holds model.embed_tokens.weight and 13 more, with a gradient each; tensors that it holds and that are not the model's, "
        "perhaps from before it was wrapped: 14",
        NAMED,
        set(),
        "huggingface/accelerate/2177",
    ),
    "NewLayer": (
        "step 1: no optimizer holds lm_head.weight, with a gradient; tensors that it holds and that are not the model's",
        NAMED,
        set(),
        "microsoft/nni/4521",
    ),
    "SecondNotStepped": (
        "step 1: no optimizer holds model.layers.0.input_layernorm.weight and 5 more, with a gradient each",
        UNEXPLAINED,
        set(),
        "",
    ),
    "StepOutsideTheGroup": (
        "step 1: model.norm.weight is held twice by optimizers, so it is updated twice",
        NAMED,
        set(),
        "",
    ),
    "NewOptimizer": (
        "step 2: what the optimizer keeps changed between step 1 and step 2: exp_avg/model.embed_tokens.weight and 41 more",
        NAMED,
        set(),
        "",
    ),
    "AverageTrained": (
        "step 2: model.embed_tokens.weight and 13 more changed between the update of step 1 and step 2",
        UNEXPLAINED,
        set(),
        "aqlaboratory/openfold/90",
    ),
    "OneRankOfTwoHasNoGradient": (
        "step 1: model.norm.weight has no gradient on rank 1, though the loss depends on it",
        NAMED,
        set(),
        "",
    ),
    "StepSkipped": (
        f"step 1: {ALL}; rank 0 stepped after 3 micro batches, rank 1 after 6",
        NAMED,
        None,
        "",
    ),
    "SteppedPerProcess": (
        "the schedule of the learning rate is stepped 2 times in a step, the number of processes",
        NAMED,
        set(),
        "huggingface/accelerate/2926",
    ),
    "SteppedPerMicroBatch": (
        "the schedule of the learning rate is stepped 3 times in a step, the number of micro batches",
        NAMED,
        set(),
        "",
    ),
    "EvalForever": (
        "after step 1 the model is trained in evaluation mode: model.train() is missing",
        NAMED,
        set(),
        "ThilinaRajapakse/simpletransformers/941",
    ),
    "SamplerForgotten": (
        "53 samples were seen again before others were seen for the first time (64 different ones in 128); data-parallel ranks 0 and 1 saw the same ones",
        NAMED,
        set(),
        "NVlabs/LongLive/71",
    ),
    "SameOrderEachEpoch": (
        "samples come in the same order in each epoch, though their sampler shuffles: sampler.set_epoch(epoch) is missing",
        NAMED,
        set(),
        "pytorch/pytorch/31771",
    ),
    "RateOfOneRank": (
        "step 1: the learning rate is 0.00101 on rank 1 and 0.001 on rank 0",
        NAMED,
        set(),
        "karpathy/nanochat/857",
    ),
    "HalfAnEpoch": (
        "a DistributedSampler divides the samples among 4, and 2 data-parallel ranks read different ones",
        NAMED,
        set(),
        "verl-project/verl/4697",
    ),
    "FirstBatchAgain": (
        "samples were seen again after 8 different ones, of the 64 that the data set has",
        UNEXPLAINED,
        set(),
        "wandb/examples/444",
    ),
    "SameMicroBatch": (
        "step 1: micro batches 0 of rank 0 and 1 of rank 0 are the same samples",
        NAMED,
        None,
        "dscripka/openWakeWord/202",
    ),
    "ShiftedTwice": (
        "step 1: each position is trained to give the token after the next one: labels are shifted twice (in micro batch 0 of rank 0)",
        NAMED,
        set(),
        "huggingface/transformers/37830",
    ),
    "OwnLossMisaligned": (
        "step 1: the labels are the next tokens, but of other positions: they are in another order, or of other rows (in micro batch 0 of rank 0)",
        NAMED,
        set(),
        "",
    ),
    "NotShifted": (
        "step 1: each position is trained to give the token itself: labels are not shifted (in micro batch 0 of rank 0)",
        NAMED,
        set(),
        "macrocosm-os/pretraining/64",
    ),
    "PaddingTrained": (
        "step 1: 6 of 55 tokens that count are padding, which attention_mask leaves out (in micro batch 0 of rank 0)",
        NAMED,
        set(),
        "arcee-ai/DAM/16",
    ),
    "DocumentsSeeEachOther": (
        "step 1: documents that are packed in a row see each other: logits from position 14, where position_ids restart, depend on tokens before it",
        NAMED,
        set(),
        "huggingface/transformers/46634",
    ),
    "MaskIgnored": (
        "step 1: the attention mask is not obeyed: logits depend on tokens that it leaves out (in micro batch 0 of rank 0",
        NAMED,
        set(),
        "",
    ),
    "SeesAhead": (
        "step 1: the logits depend on the tokens that they must give: those up to position 17 on later tokens",
        NAMED,
        set(),
        "huggingface/transformers/48748",
    ),
    "NotTied": (
        "step 1: lm_head.weight is not tied to model.embed_tokens.weight, though the model's configuration says so (tie_word_embeddings)",
        NAMED,
        set(),
        "huggingface/transformers/43429",
    ),
    "UntiedLater": (
        "step 1: lm_head.weight is a parameter of its own, though it was tied when the recording began",
        NAMED,
        None,
        "",
    ),
    "SameSamples": (
        "step 1: ranks 0, 1 were called with the same micro batch 0, though ranks 0 and 1 hold the same weights",
        NAMED,
        None,
        "",
    ),
    "ModuleOff": (
        "step 1: forward/model.layers.0.mlp.up_proj (micro batch ",
        UNEXPLAINED,
        ", rank 1) is the first of",
        "",
    ),
    "ModuleGradientOff": (
        "step 1: backward/model.layers.0.post_attention_layernorm (micro batch ",
        UNEXPLAINED,
        ", rank 1) is the first of",
        "",
    ),
    "AllZero": (
        "step 1: no parameter has a gradient other than zero: they were set to zero between",
        NAMED,
        None,
        "",
    ),
    "NeverSynced": (
        "step 1: no parameter has a gradient other than zero: they were set to None before",
        NAMED,
        None,
        "",
    ),
    "NotFinite": ("step 1: the gradient of model.norm.weight is not finite", UNEXPLAINED, None, ""),
    "OtherWeights": (
        "step 1: weights differ between ranks that hold the same: model.layers.0.mlp.down_proj.weight on rank 1",
        UNEXPLAINED,
        "forward/model.layers.0.mlp.down_proj (micro batch",
        "",
    ),
    "BalanceTimesWorld": (
        f"step 1: aux_loss, a term of the loss, counts 2 times as often as the rest, which is {DP}",
        NAMED,
        1.0,
        "NVIDIA-NeMo/Automodel/1412",
    ),
    "BalanceTimesAccumulation": (
        "step 1: aux_loss, a term of the loss, counts 3 times as often as the rest, which is the micro batches of a rank",
        NAMED,
        1.0,
        "NVIDIA/Megatron-LM/3768",
    ),
    "BalanceTenfold": (
        "step 1: aux_loss, a term of the loss, counts 10 times as often as the rest",
        UNEXPLAINED,
        1.0,
        "",
    ),
    "BalanceDead": (
        "step 1: aux_loss, a term of the loss, does not count",
        NAMED,
        1.0,
        "NVIDIA-NeMo/Automodel/1408",
    ),
    "MeshTimesTp": (
        f"step 1: the gradient is 2 times {MEANS}, which is {GROUPS}{BEGINS}",
        NAMED,
        2.0,
        "huggingface/transformers/39648",
    ),
    "MeshBalanceTimesTp": (
        f"step 1: aux_loss, a term of the loss, counts 2 times as often as the rest, which is {GROUPS}",
        NAMED,
        1.0,
        "NVIDIA/Megatron-LM/5047",
    ),
    "MeshDividedByWorld": (
        f"step 1: the gradient is 0.5 times {MEANS}, which is 1 / the number of data-parallel ranks or 1 / the ranks that see the same samples{LATER}",
        NAMED,
        0.5,
        "meta-pytorch/torchtune/2641",
    ),
    "MeshOtherBatches": (
        f"step 1: {SHARED}; ranks 0 and 1 have parts of one model, and were called with different micro batches",
        NAMED,
        None,
        "deepspeedai/DeepSpeed/7199",
    ),
    "MeshSameBatches": (
        "step 1: ranks 0, 1, 2, 3 were called with the same micro batch 0, though FSDP2 divides the samples among them",
        NAMED,
        None,
        "Shark-NLP/DiffuSeq/37",
    ),
    "MeshTpNorm": (
        "step 1: the gradient was clipped by a norm of ",
        UNEXPLAINED,
        ", 1.4",
        "NVIDIA-NeMo/RL/3788",
    ),
    "MeshNormOfTpShard": (
        f"step 1: {SHARED}; they were clipped by different norms, 0.7",
        NAMED,
        None,
        "huggingface/transformers/36132",
    ),
    "MeshWrongGroup": (
        "step 1: gradients differ between ranks that hold the same: model.embed_tokens.weight on rank 2 and 13 more; they were not reduced over ranks 0 and 2, or not all of them",
        NAMED,
        "the micro batches count 0.3333, 0.3333, 0.3333 (rank 0); 0, 0, 0 (rank 2)",
        "",
    ),
    "MeshShardTwice": (
        "step 1: 3 of 14 gradients are too far from the reference, most of all model.layers.0.mlp.",
        UNEXPLAINED,
        {f"gradient/model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        "pytorch/torchtitan/2106",
    ),
    "MeshBiasTwice": (
        "step 1: forward/model.layers.0.mlp.down_proj (micro batch",
        UNEXPLAINED,
        None,
        "huggingface/text-generation-inference/1036",
    ),
    "MeshNoBackwardSum": (
        # The last norm's gradient is right but for the clipping.
        f"step 1: {SHARED.replace('10 more', '9 more')}; {UNREDUCED}: these have parts of one model, so a sum in the backward pass",
        NAMED,
        "backward/model.layers.0.post_attention_layernorm (micro batch",
        "pytorch/torchtitan/1805",
    ),
}
VARIANTS = [
    *(
        "Right",
        "MicroMeans",
        "MicroStepMeans",
        "Shuffled",
        "SmallBuckets",
        "StaticGraph",
        "NoSync",
        "ReducedByHand",
        "Fused",
        "Foreach",
    ),
    *(
        "TwoOptimizers",
        "DecayGroups",
        "ZeroedInPlace",
        "Padded",
        "PaddedLeft",
        "Packed",
        "PackedApart",
        "PackedByPosition",
    ),
    *(
        "Checkpointed",
        "CheckpointedReentrant",
        "Compiled",
        "Autocast",
        "Fsdp",
        "FsdpBf16",
        "LossInBf16",
        "Eager",
        "Scaled",
        "Frozen",
    ),
    *(
        "Unfrozen",
        "Lora",
        "Evaluated",
        "PartEvaluated",
        "Untied",
        "Averaged",
        "LossLogged",
        "Tagged",
        "Classified",
        "LastWindowRight",
        "Mixture",
    ),
    *("Scheduled", "Epochs", "Mesh", "MeshBalance", "Hybrid", "AllBfloat16"),
]
# Wrong, and a PASS: docs/record.md says so.
UNSEEN = [
    "RateWrong",
    "LoraBaseTrained",
    "DrawnAnew",
    "NeverCalled",
    "DocumentsJoined",
    "AutocastInside",
]


@pytest.fixture(scope="module")
def judged(new_folder):
    """The folder of each loop, recorded and judged: one start for those of two ranks, one for those of four."""
    folder, groups = new_folder("loops"), {}
    bugs = steps_of({name: row[0] for name, row in BUGS.items()})
    for name, steps in {**bugs, **dict.fromkeys(VARIANTS, 2), **dict.fromkeys(UNSEEN, 1)}.items():
        groups.setdefault(getattr(record_bugs, name).ranks, {})[name] = steps
    run_groups(
        [(size, "record_bugs:run", folder / str(size), names) for size, names in groups.items()], timeout=1600
    )
    return {name: folder / str(size) / name for size, names in groups.items() for name in names}


def steps_of(verdicts):
    """How many steps are recorded of each bug: no more than show it."""
    return {name: 2 if said.startswith("step 2") else 1 for name, said in verdicts.items()}


def said(folder):
    status, *lines = (folder / "said.txt").read_text().splitlines()
    return int(status), lines


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_caught_for_its_own_reason(judged, name):
    first, _, found, _ = BUGS[name]
    status, lines = said(judged[name])
    assert status == 1, lines
    assert lines[-1].startswith(f"FAIL: {first}"), lines[-1]
    report = json.loads((judged[name] / "report.json").read_text())
    step = report["steps"][1 if first.startswith("step 2") else 0]
    if isinstance(found, float):
        assert math.isclose(step["factor"], found, rel_tol=1e-5)
    elif isinstance(found, set):
        tensors = {key for key, (_, multiple, _) in step["tensors"].items() if multiple > 1}
        assert {key for key in tensors if key.startswith("gradient/")} == found
    elif found:
        assert any(found in sentence for sentence in step["wrong"]), step["wrong"]


def test_the_page_of_each_bug_names_its_cause_or_says_that_there_is_none(judged):
    """Also where no tensor is too far."""
    named = {name: "<dd>not explained: " not in (judged[name] / "report.html").read_text() for name in BUGS}
    assert named == {name: expected for name, (_, expected, *_) in BUGS.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_correct_variants_raise_no_alarm(judged, name):
    status, lines = said(judged[name])
    assert status == 0 and lines[-1].startswith("PASS: "), lines


def test_what_each_micro_batch_counts_in_a_wrong_gradient(judged):
    """Where all others are right. Negative controls: a gradient of zeros, and twice the right one."""
    counts = "; in this gradient, the micro batches count 0.3333, 0.3333, 0.3333 (rank 0); 0, 0, 0 (rank 1)"
    assert any(counts in line for line in said(judged["LayerNotReduced"])[1])
    for name in ("FrozenByZeroing", "MeshShardTwice"):
        assert not any("; in this gradient, the micro batches" in line for line in said(judged[name])[1])


def test_a_mean_over_the_ranks_is_called_right_only_if_it_is(judged):
    """Negative control of BUGS: ranks have other gradients because each lacks a part of a sum in the backward pass."""
    assert not any(MEAN in line for line in said(judged["MeshNoBackwardSum"])[1])


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen(judged, name):
    """A change that makes one of these a FAIL is welcome: it moves to the table above, and out of docs/record.md."""
    status, lines = said(judged[name])
    assert status == 0 and lines[-1].startswith("PASS: "), lines
    assert name != "AutocastInside" or ", in torch.bfloat16" in lines[0]


def test_enough_bugs_have_a_public_thread():
    threads = [thread for *_, thread in BUGS.values() if thread]
    assert len(threads) >= 24 and all(thread.count("/") == 2 for thread in threads)
    assert len(VARIANTS) >= 20
