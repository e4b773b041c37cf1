"""What rules of the diagnosis ask a Case for, made of tensors: a run whose first wrong tensor is the output of a module."""

import functools
from types import SimpleNamespace

import torch

from lockstep.diagnosis.case import Case
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import describe

TOLERATED = {"fp32": 1e-6, "autocast": 2e-2}  # relative, of the norm


def case_of(
    first, own, right, tensors, *, precision="fp32", step=1, weights=(), sources=None, tp=1, **further
):
    """`tensors` are captured, `weights` are {parameter: tensor} before each step, and `sources` is as in a layout."""
    tensors = {**tensors, first: own}
    weights = dict(enumerate(weights, 1)) or {1: {}}
    sources = sources or {}
    tolerated = TOLERATED[precision]
    distance = SimpleNamespace(
        error=float((own - right).norm()), own_norm=float(own.norm()), norm=float(right.norm())
    )
    row = SimpleNamespace(
        tolerated=tolerated * distance.norm, tolerated_largest=5 * tolerated, distance=distance
    )
    case = SimpleNamespace(
        first=first,
        path=first.partition("/")[2],
        step=step,
        own=tensors.__getitem__,
        right=lambda _name: right,
        before=lambda name, of_step=None: weights[of_step or step][name],
        has=lambda *names: all(name in tensors for name in names),
        is_wrong=lambda name: name == first,
        entry={"tensors": {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()}},
        names=describe(BUILT_IN["tiny-qwen2"]).names,
        head_size=16,
        options={"precision": precision},
        mesh=SimpleNamespace(tp=tp),
        sharded=lambda _name: {"tp": 2} if tp > 1 else {},
        rows={first: row},
        **{"pieces": [], "cp_rank_of": lambda length: torch.zeros(length, dtype=torch.long), **further},
    )
    layout = SimpleNamespace(
        sources=sources,
        parameters={name: tensor.shape for name, tensor in weights[1].items()},
        outputs={name.partition("/")[2]: tensor.shape for name, tensor in tensors.items()},
    )
    case.dump = SimpleNamespace(layout=layout, run={"architecture": further.get("architecture", {})})
    for method in ("leaves_little", "weight_of", "source", "is_transposed", "is_linear", "explains"):
        setattr(case, method, functools.partial(getattr(Case, method), case))
    return case
