"""Single pieces of evidence: each is found where it is, and not where it is not. What is made of them."""

import math
from types import SimpleNamespace

import pytest
import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.diagnose import diagnose
from lockstep.tensors.comparison import judge
from lockstep.tensors.distance import Distance, Size
from lockstep.tensors.judgement import ROUNDING, Result

TRUE = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).double()
NOISE = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).double()
SIZES = {"tp": 2, "dp": 3, "accumulation steps": 5}


def test_a_factor_is_told_from_noise():
    assert evidence.factor_of(2 * TRUE, TRUE) == pytest.approx((2.0, 0.0))
    assert evidence.factor_of(2 * TRUE + NOISE, TRUE)[1] > 0.3
    assert evidence.factor_of(TRUE + 1e-3 * NOISE, TRUE)[1] > 0.9  # a small error is not a factor of one
    assert math.isnan(evidence.factor_of(TRUE, 0 * TRUE)[0]) and math.isnan(evidence.factor_of(TRUE, TRUE)[0])


def test_a_multiple_is_told_from_noise():
    assert evidence.multiple_of(TRUE, TRUE) == pytest.approx((1.0, 0.0)) and evidence.multiple_of(TRUE, NOISE)[1] > 0.9
    assert math.isnan(evidence.multiple_of(TRUE, 0 * TRUE)[0]) and math.isnan(evidence.multiple_of(TRUE * math.nan, TRUE)[0])


def test_one_factor_for_all():
    assert evidence.common_factor([2.0, 2.001, 2.0], [1e-6] * 3) == 2.0
    assert evidence.common_factor([2.0, 2.1, 2.0], [1e-6] * 3) is None
    assert evidence.common_factor([2.0, 2.0], [1e-6, 0.5]) is None and evidence.common_factor([], []) is None


@pytest.mark.parametrize("factor, names", [
    (2.0, ["tp"]), (0.5, ["1/tp"]), (3.0, ["dp"]), (1 / 6, ["1/(tp x dp)"]), (5.0, ["accumulation steps"]),
    (math.sqrt(2), ["sqrt(tp)"]), (1.0, []), (2.2, []), (-2.0, []),
])  # fmt: skip
def test_the_name_of_a_factor(factor, names):
    assert evidence.name_factor(factor, SIZES) == names


def test_sizes_of_one_explain_nothing():
    assert evidence.name_factor(1.0, {"tp": 1, "dp": 1}) == []


def test_dropout():
    keep = torch.rand(TRUE.shape, generator=torch.Generator().manual_seed(2)) >= 0.1
    assert evidence.dropped_elements(TRUE * keep / 0.9, TRUE) == pytest.approx(0.1, abs=0.03)
    assert evidence.dropped_elements(TRUE * keep, TRUE) is None  # zeros alone
    assert evidence.dropped_elements(NOISE * keep / 0.9, TRUE) is None
    assert evidence.dropped_elements(TRUE, TRUE) is None


def test_rounded_to_bfloat16():
    assert evidence.is_rounded_to_bfloat16(TRUE.bfloat16().double())
    assert not evidence.is_rounded_to_bfloat16(TRUE.float().double()) and not evidence.is_rounded_to_bfloat16(0 * TRUE)


class Recorded:
    """What sample_weights reads of a dump: two DP ranks, three micro batches, a norm over 64 channels."""

    run = {"config": {"dp_size": 2, "gradient_accumulation_steps": 3}}

    def __init__(self, weights, spoilt=0.0):
        generator = torch.Generator().manual_seed(3)
        self.forward = torch.randn(12, 8, 64, generator=generator).double()
        self.backward = torch.randn(12, 8, 64, generator=generator).double()
        shares = (self.forward * self.backward).flatten(0, 1).unflatten(0, (6, -1)).sum(1)
        self.gradient = (torch.tensor(weights).double().view(6, 1) * shares).sum(0) + spoilt * shares[0].roll(1)

    def tensor(self, step, name):
        return {"forward/model.norm": self.forward, "backward/model.norm": self.backward, "gradient/model.norm.weight": self.gradient}[name]


@pytest.mark.parametrize("weights", [[1.0] * 6, [2.0, 2.0, 2.0, 0.0, 0.0, 0.0], [0.5, 1.0, 1.5, 0.5, 1.0, 1.5]])
def test_which_samples_are_in_a_gradient(weights):
    found, left = evidence.sample_weights(Recorded(weights), 1, torch.ones(64).double())
    assert left < 1e-9 and torch.allclose(found, torch.tensor(weights).double().view(2, 3).expand(2, 2, 3))


def test_what_no_samples_explain_is_said():
    assert evidence.sample_weights(Recorded([1.0] * 6, spoilt=1.0), 1, torch.ones(64).double())[1] > 0.1


class Written:
    """What a diagnosis reads of a dump: tensors by name, of one step."""

    label, contract = "FSDP", {"tied_embeddings": False}
    layout = SimpleNamespace(sources={"model.norm": ("model.layers.1",)})
    run = {"config": {"tp_size": 2, "dp_size": 2, "gradient_accumulation_steps": 1, "precision": "fp32"}}

    def __init__(self, tensors, sharded=None, replicas_differ=None):
        entries = {name: {"dtype": "F32", "shape": list(t.shape), "sharded": (sharded or {}).get(name, {})} for name, t in tensors.items()}
        self.tensors, self.steps = tensors, {"1": {"tensors": entries, "replicas_differ": replicas_differ or {}}}

    def tensor(self, step, name):
        return self.tensors[name]

    def expected(self, step):
        return self.tensors


NAMES = ["forward/model.norm", "backward/model.norm", "gradient/model.norm.weight", "gradient/w", "gradient/v", "parameter/w", "parameter/v"]


def named_cause(changes, sharded=None, replicas_differ=None):
    """Diagnose a run that differs from the truth by `changes`: name -> what its tensor is instead."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"forward/model.norm": (4, 8, 64), "backward/model.norm": (4, 8, 64), "gradient/model.norm.weight": (64,)}
    truth = {name: torch.randn(shapes.get(name, (16, 8)), generator=generator).double() for name in NAMES}
    z = truth["forward/model.norm"]
    truth["gradient/model.norm.weight"] = (z * truth["backward/model.norm"]).sum(dim=(0, 1))
    own = {name: changes[name](tensor) if name in changes else tensor for name, tensor in truth.items()}
    truth["parameter/model.norm.weight"] = torch.ones(64).double()
    before = {f"parameter/{name}": truth[f"parameter/{name}"] - 0.01 for name in ("w", "v")}
    rows = []
    for name, tensor in own.items():
        error, exact = tensor - truth[name], truth[name]
        change = exact - before[name] if name in before else exact
        scale = 1 + float((error * change).sum() / (change * change).sum())
        sizes = [(float(t.norm()), float(t.abs().max())) for t in (error, exact)]
        distance = Distance(*sizes[0], *sizes[1], float(tensor.norm()), float(change.norm()), float(change.abs().max()), scale)
        rows.append(judge("fsdp", 1, name, distance, Size(1e-7, 1e-7), ROUNDING["F32"]))
    dump = Written(own, sharded, replicas_differ)
    reference = Written({**truth, **before})
    found = diagnose(Result({"fsdp": dump}, "ddp", rows, [], {}, {}, []), "fsdp", reference, {})
    return found.causes[0].name if found.causes else None, found


def test_nothing_wrong_nothing_named():
    assert named_cause({})[0] is None


def test_noise_in_a_gradient_is_not_called_a_factor():
    noisy = lambda tensor: tensor + 1e-3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(6)).double()  # noqa: E731
    _, found = named_cause({name: noisy for name in NAMES if name.startswith("gradient")})
    assert "1 times" not in found.causes[0].evidence and found.causes[0].weight == 1


def test_a_factor_in_every_gradient():
    cause, found = named_cause({name: lambda tensor: 2 * tensor for name in NAMES if name.startswith("gradient")})
    assert cause == "gradient scale" and "2 = tp or dp" in found.causes[0].evidence
    assert found.excluded == ["forward: right in step 1", "backward: right in step 1"]  # no batch was captured: nothing is said of it


def test_what_is_wrong_as_well_is_not_excluded():
    _, found = named_cause({"backward/model.norm": lambda tensor: -tensor, "gradient/w": lambda tensor: -tensor})
    assert found.excluded == ["forward: right in step 1"]
    assert named_cause({"backward/model.norm": lambda tensor: -tensor, "forward/model.norm": lambda tensor: -tensor})[1].excluded == []


def test_a_gradient_that_is_not_finite():
    cause, _ = named_cause({"gradient/w": lambda tensor: tensor * math.nan, "gradient/model.norm.weight": lambda tensor: tensor * math.nan})
    assert cause is not None


def test_a_parameter_that_did_not_change():
    assert named_cause({"parameter/w": lambda tensor: tensor - 0.01})[0] == "update left out"


@pytest.mark.parametrize("name, cause", [("gradient/w", "tp reduction missing"), ("parameter/w", "weights")])
def test_replicas_that_differ_though_the_one_that_was_written_is_right(name, cause):
    assert named_cause({}, replicas_differ={name: [1, 3]})[0] == cause


def test_the_share_that_did_not_change():
    """Of a tensor that both axes cut along one dim: dp rank 1 has the second and the fourth quarter."""

    def kept(tensor):
        changed = tensor.clone()
        changed[4:8] -= 0.01
        changed[12:] -= 0.01
        return changed

    cause, found = named_cause({"parameter/w": kept}, sharded={"parameter/w": {"dp": 0, "tp": 0}})
    assert cause == "update left out" and "share of dp rank 1 of 2" in found.causes[0].evidence


def test_what_a_captured_name_stands_for():
    assert evidence.in_words("model.layers.1.self_attn.o_proj.input") == "model.layers.1.self_attn.o_proj's input"
    assert evidence.in_words("model.layers.1") == "model.layers.1's output" and evidence.in_words("model.rotary_emb.1") == "output 1 of model.rotary_emb"
    assert evidence.in_words("model.layers.0.input_layernorm") == "model.layers.0.input_layernorm's output"


def test_what_enters_is_called_right_only_where_it_was_seen(monkeypatch):
    """The source of the last norm was not captured here; of one that was, the name is given."""
    wrong = {"forward/model.norm": lambda tensor: -tensor}
    assert "is right" not in " ".join(cause.evidence for cause in named_cause(wrong)[1].causes)
    monkeypatch.setitem(Written.layout.sources, "model.norm", ("w",))
    monkeypatch.setitem(globals(), "NAMES", ["forward/w", *NAMES])
    assert "what it is computed from is right: w's output" in " ".join(cause.evidence for cause in named_cause(wrong)[1].causes)


@pytest.mark.parametrize("name, cause", [("l.self_attn.o_proj.input", "attention implementation"), ("l.mlp.down_proj.input", "computation")])
def test_what_is_wrong_between_two_modules_is_no_weight(monkeypatch, name, cause):
    """The output of the attention itself is seen where it enters o_proj."""
    monkeypatch.setitem(Written.layout.sources, name, ("w",))
    monkeypatch.setitem(globals(), "NAMES", ["forward/w", f"forward/{name}", *NAMES])
    found, diagnosis = named_cause({f"forward/{name}": lambda tensor: 1.5 * tensor + 0.1})
    assert found == cause and "no weights lie between" in diagnosis.causes[0].evidence and "w's output" in diagnosis.causes[0].evidence
