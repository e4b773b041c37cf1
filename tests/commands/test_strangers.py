"""Strategies in users' own files (tests/strangers), through the default command: correct ones pass, and of the others nothing false is said.

A sample, in one start of the ranks for each set, on small batches; `benchmarks/strangers.py` takes all, each command in a process of its own.
"""

import importlib.util

import pytest
import strangers
from programs import in_process

VARIANTS = [
    "RotaryFrom100",
    "EagerAttention",
    "LossScale",
    "DividedAfterSum",
    "ChunkedCrossEntropy",
    "CheckpointingByTransformers",
    "ForeachAdamW",
    "TensorRateAdamW",
    "OwnAdamW",
    "FactorByHand",
    "StockClipping",
    "LogitsSkipped",
    "LogitsSkippedAndScaled",
    "OwnedByTurns",
    "InHalves",
    "LookedAtBefore",
    "ValidatedInTheStep",
    "CompiledLayers",
    "FusedActivation",
]
BUGS = [
    "TiedHeadKeepsFirstWeights",
    "RootNotSharded",
    "CoupledDecay",
    "DecayOnOneRankOnly",
    "BetasSwappedInOneGroup",
    "NormEpsilon",
    "ConstantSubtractedFromNorm",
    "AverageTakenForWeights",
    "EveryRankTheSameBatch",
    "InputsRolledOnOneRank",
    "LabelSmoothing",
    "EmbeddingKeepsItsOwn",
    "FusedActivationOfOneRank",
]
NEEDS_ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="expert parallelism of transformers needs accelerate",
)
EXPERT_VARIANTS = ["ExpertsByEager", "SoftmaxOfChosen"]
SMALL = ["--batch_size", "2", "--seq_length", "32"]
EXPERTS = [
    "ExpertGradientsSummed",
    "TokensDroppedInOneLayer",
    "OneTokenGoesElsewhere",
    "BalanceDividedByDp",
]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    def completed(arguments, _folder, _limit):
        done = in_process("run_verification.py", *arguments, *SMALL)
        return done.returncode, done.stderr

    monkeypatch.setattr(strangers, "completed", completed)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (strangers.VARIANTS, VARIANTS),
        pytest.param(strangers.EXPERTS, EXPERT_VARIANTS, marks=NEEDS_ACCELERATE),
    ],
)
def test_correct_variants_pass(path, names):
    rows = dict(strangers.variants(names, together=len(names), path=path))
    assert rows.keys() == set(names)
    assert {
        name: strangers.summary(row["found"]) for name, row in rows.items() if not row["right"]["passes"]
    } == {}


@pytest.mark.parametrize(
    ("path", "names"),
    [(strangers.BUGS, BUGS), pytest.param(strangers.EXPERTS, EXPERTS, marks=NEEDS_ACCELERATE)],
)
def test_bugs_are_caught_where_they_are(path, names):
    rows = dict(strangers.bugs(names, together=len(names), path=path))
    assert rows.keys() == set(names)
    wrong = {
        name: (strangers.summary(row["found"]), row["right"])
        for name, row in rows.items()
        if not all(row["right"].values())
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "PASS"},
        {"first": [2, 0.0, "gradient/model.norm.weight", ""]},
        {"first": [1, 0.0, "forward/model.norm", ""]},
        {"diagnosis": {"causes": [{"name": "clipping", "evidence": "the norm is twice what it should be"}]}},
    ],
)
def test_what_is_not_as_expected_is_seen(change):
    """Negative control: of a bug in the gradients, about which nothing may be named."""
    expected = strangers.of_file(strangers.BUGS, "Expected")("", 1, "gradient", "gradient/model.norm", "", "")
    found = {
        "report": True,
        "verdict": "FAIL",
        "first": [1, 0.0, "gradient/model.norm.weight", ""],
        "diagnosis": {"causes": []},
        "configured_differently": {},
    }
    assert all(strangers.judge("Stranger", expected, found).values())
    assert not all(strangers.judge("Stranger", expected, {**found, **change}).values())
