"""Make a model compute in float64: its own code, run in a mode in which float32 means float64.

A model casts to float32 where low precision would hurt: in norms, softmax and loss. Inside `Float64` these casts are to float64, and so
are those to bfloat16 and the default dtype; `torch.finfo` still speaks of float32. What does not depend on the weights, such as a rotary
table, is an input: it stays as the runs compute it, in float32.

A mixture's router chooses experts by `torch.topk`. Where two scores are nearly equal, rounding errors decide, and everything after it
differs. So the reference can be told what a run chose. It then reports how far each choice is from being its own.
"""

import contextlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.dumps.trace import CountsTopk, Function, Given, Named, TopkArguments
from lockstep.inputs import checkpoints
from lockstep.inputs.shapes import use_eager_experts
from lockstep.verdict import draws
from lockstep.verdict.draws import drawn_in, is_drawing

# mypy does not know them.
CFLOAT, CDOUBLE = (getattr(torch.Tensor, name) for name in ("cfloat", "cdouble"))
# Dtypes, and methods that cast to them: what each is in float64
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
LOWER = {torch.bfloat16: torch.float64, torch.float16: torch.float64}
CASTS = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    CFLOAT: CDOUBLE,
}
NARROWER = {wide: narrow for narrow, wide in WIDER.items()}
Place = tuple[CodeType, int, int]  # code, an instruction in it, and how many times it was there
# Modules that are not the model's code: those of the mode itself, and packages whose own code must know the real dtype
OF_MODES = (__name__, CountsTopk.__module__)
OF_US = ("torch", __name__.partition(".")[0])
GROUPS = " (groups)"  # after the name of a choice of experts


@dataclass
class Taken:
    """A choice that the model was told, such as of experts."""

    regret: float  # by how much a score that was left out is above one that was taken, at most
    scores: torch.Tensor


class Entropy(NamedTuple):
    """A call of cross_entropy, or of nll_loss: logarithms of probabilities are logits, too."""

    logits: torch.Tensor  # (tokens, V)
    targets: torch.Tensor  # (tokens), -1 where none

    @classmethod
    def of(cls, *arguments: Any, **named: Any) -> "Entropy":
        """Return the call with these arguments."""
        bound = inspect.signature(F.cross_entropy).bind(*arguments, **named)
        bound.apply_defaults()
        logits, targets = bound.arguments["input"], bound.arguments["target"]
        batched = logits.detach() if logits.ndim > 1 else logits.detach()[None]
        rows = batched.movedim(1, -1).flatten(0, -2)
        if targets.is_floating_point():
            # Targets are probabilities, not classes
            return cls(rows, targets.new_empty(0, dtype=torch.long))
        return cls(
            rows, targets.flatten().masked_fill(targets.flatten() == bound.arguments["ignore_index"], -1)
        )


class Told(CountsTopk):
    """A pass of a reference in which `torch.topk` returns the `choices` that it is told, by the number of the call.

    It computes on the CPU, whatever device the model's code names.

    A router may choose groups of experts in the call before. It is then told the groups of the experts. `widths` show that there
    is such a call: the numbers of scores that experts are chosen from, by the number of the call.

    `own` has the indices that calls without a told choice returned. `regrets` has, for each told call and every row, by how much
    the least chosen score is below the greatest that was not chosen. It is at most 0 where the choice is the mode's own, and
    infinite where topk could not make it: one index twice, or out of range. `scores` has what each told call chose from.
    """

    def __init__(self, choices: dict[int, torch.Tensor] | None = None, widths: dict[int, int] | None = None):
        super().__init__()
        self.choices, self.regrets = choices or {}, dict[int, torch.Tensor]()
        self.scores: dict[int, torch.Tensor] = {}
        self.widths = widths or {}
        # For a run on a device that draws other random numbers: which elements a call of dropout kept, by its number
        self.kept_of: draws.Keep | None = None
        # If asked for: the dtypes of calls that draw, by their number, and the dtypes that the model's code reads of tensors, by
        # the place in the code
        self.dtypes: dict[int | Place, torch.dtype] | None = None
        # If asked for: the calls of cross_entropy
        self.entropies: list[Entropy] | None = None

    def __enter__(self) -> Self:
        self._checkpoints = checkpoints.left_out()
        self._checkpoints.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._checkpoints.__exit__(*raised)

    def call(self, function: Function, args: Given, kwargs: Named) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.dtype:
            return self.read_dtype(args[0].dtype)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if self.kept_of is not None:
            draws.require_no_dropout(function, args, kwargs)
            if function is F.dropout:
                result = draws.dropped(self.kept_of, self.counts["dropout"], args, kwargs)
                self.counts["dropout"] += result is not None
                return function(*args, **kwargs) if result is None else result
        if function in (F.cross_entropy, F.nll_loss) and self.entropies is not None:
            self.entropies.append(Entropy.of(*args, **kwargs))
        replacements: dict[Function, Function] = {F.gumbel_softmax: draws.GUMBEL_SOFTMAX}
        if self.kept_of is not None:
            replacements[F.multi_head_attention_forward] = draws.ATTENTION_OF_HEADS
        if function in replacements:
            # The mode sees the calls inside, too
            TorchFunctionMode.__enter__(self)
            try:
                return replacements[function](*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
        if not is_drawing(function):
            return super().call(function, args, kwargs)
        self.counts["draw"] += 1
        return self.draw(self.counts["draw"] - 1, function, args, kwargs)

    def read_dtype(self, found: torch.dtype) -> torch.dtype:
        """Return the dtype that the model's code reads of a tensor, which has the dtype `found`."""
        place = self._place()
        if self.dtypes is not None and place is not None:
            self.dtypes[place] = found
        return found

    def _place(self) -> Place | None:
        """Return the place of the code that called a function, and how many times it was there.

        None for code of torch or Lockstep, which must know the real dtype.
        """
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in OF_MODES and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in OF_US:
            return None
        place = frame.f_code, frame.f_lasti
        self.counts[place] += 1
        return *place, self.counts[place]

    def draw(self, number: int, function: Function, args: Given, kwargs: Named) -> Any:
        """Return what a function that draws random numbers returns. `number` is that of the call."""
        result = function(*args, **kwargs)
        if self.dtypes is not None:
            tensors = [leaf for leaf in (result, *args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
            # A mask of bools is drawn in no floating dtype, in the run and here.
            dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
            if dtype is not None:
                self.dtypes[number] = dtype
        return result

    def _groups(self, number: int, scores: torch.Tensor, result: Any) -> torch.Tensor | None:
        """Return the indices of the groups of the next call's experts, then those of the best other groups.

        None if this call chooses no groups, or the next one is not told its experts.
        """
        experts, width, num_groups = (
            self.choices.get(number + 1),
            self.widths.get(number + 1, 0),
            scores.shape[-1],
        )
        if experts is None or width <= num_groups or width % num_groups:
            return None
        told_groups = experts.reshape(*scores.shape[:-1], -1) // (width // num_groups)
        priority = torch.zeros_like(scores).scatter(-1, told_groups.clamp(0, num_groups - 1), torch.inf)
        return torch.topk(scores + priority, result.indices.shape[-1]).indices

    def taken(self, names: dict[int, str]) -> dict[str, Taken]:
        """Return the choices that were told, by name.

        `names` are those of the choices of experts, by the number of the call. The choice of their groups has GROUPS after the name.
        """
        return {
            names.get(number) or names[number + 1] + GROUPS: Taken(float(regret.max()), self.scores[number])
            for number, regret in self.regrets.items()
        }

    def see_topk(self, number: int, arguments: TopkArguments, result: Any) -> Any:
        """Return what topk would return if it chose as it is told."""
        scores, dim = arguments.input, arguments.dim
        told = self.choices.get(number)
        if told is None and dim % scores.ndim == scores.ndim - 1:
            told = self._groups(number, scores, result)
        if told is None:
            self.widths[number] = scores.shape[dim]
            return result
        # The dim of the choice is the last from here on.
        told, scores = told.reshape(result.indices.shape).movedim(dim, -1), scores.movedim(dim, -1)
        indices = told.clamp(0, scores.shape[-1] - 1)
        values = scores.gather(-1, indices)
        chosen = torch.return_types.topk((values.movedim(-1, dim), indices.movedim(-1, dim)))
        with torch.no_grad():
            if not arguments.largest:
                scores, values = -scores, -values
            self.scores[number] = scores.detach()
            best_other = scores.scatter(-1, indices, -torch.inf).amax(-1)
            sorted_told = told.sort(-1).values
            is_impossible = (told != indices).any(-1) | (sorted_told[..., 1:] == sorted_told[..., :-1]).any(
                -1
            )
            self.regrets[number] = (best_other - values.amin(-1)).masked_fill(is_impossible, torch.inf)
        return chosen


class Float64(Told):
    """Inside, torch.float32, bfloat16 and float16 mean torch.float64.

    `dtypes` are those in which the run drew random numbers, float32 for calls that it lacks, and those that its code read of
    tensors, which it may require or branch on. Without `dtypes`, all are float64. `lowered` tells whether something asked for
    bfloat16 or float16.
    """

    lowered = False
    wide, drawn = torch.float64, torch.float32
    # What dtypes, and methods that cast, mean inside
    meanings: dict[torch.dtype, torch.dtype] = {**WIDER, **LOWER}
    casts: dict[Function, Function] = CASTS

    def __enter__(self) -> Self:
        self._default, self._finfo = torch.get_default_dtype(), torch.finfo
        torch.set_default_dtype(self.wide)
        # A constant of the dtype in the code is part of what the code computes
        torch.finfo = self._finfo_of_run  # type: ignore[misc,assignment]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._default)
        torch.finfo = self._finfo  # type: ignore[misc]

    def _finfo_of_run(self, dtype: torch.dtype = torch.float32) -> torch.finfo:
        return self._finfo(torch.float32 if dtype is torch.float64 else dtype)

    def call(self, function: Function, args: Given, kwargs: Named) -> Any:
        if function in self.casts:
            self.lowered |= function in (torch.Tensor.bfloat16, torch.Tensor.half)
            function = self.casts[function]
        # No function of torch takes a dtype inside of another argument
        args = tuple(map(self._widened, args))
        kwargs = {name: self._widened(value) for name, value in kwargs.items()}
        if not (_is_in_place(function) or "out" in kwargs):
            args, kwargs = self._of_one_width(args, kwargs)
        return super().call(function, args, kwargs)

    def read_dtype(self, found: torch.dtype) -> torch.dtype:
        if self.dtypes is None or found is not self.wide:
            return found
        place = self._place()
        return found if place is None else self.dtypes.get(place, found)

    def draw(self, number: int, function: Function, args: Given, kwargs: Named) -> Any:
        if self.dtypes is None:
            return function(*args, **kwargs)
        return drawn_in(self.dtypes.get(number, self.drawn), function, args, kwargs, self.wide)

    def _widened(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.dtype) or leaf not in self.meanings:
            return leaf
        self.lowered |= leaf in LOWER
        return self.meanings[leaf]

    def _of_one_width(self, args: Given, kwargs: Named) -> tuple[Any, Named]:
        """Return the arguments, with float32 tensors in float64 if another one is. Such may be a constant of the model's file."""
        dtypes = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        if dtypes.isdisjoint(self.meanings.values()) or dtypes.isdisjoint(self.meanings):
            return args, kwargs
        return tuple(_cast(args, self.meanings)), _cast(kwargs, self.meanings)


class Float32(Float64):
    """The yardstick's mode for a run in float64: inside, torch.float64 means torch.float32."""

    wide, drawn, meanings = torch.float32, torch.float64, NARROWER
    casts = {torch.Tensor.double: torch.Tensor.float, CDOUBLE: CFLOAT}


def _on_cpu(value: Any) -> Any:
    """Return the CPU in the place of a device, but for the meta device, and any other value as it is."""
    is_device = isinstance(value, (str, torch.device, int)) and not isinstance(value, bool)
    return torch.device("cpu") if is_device and str(value) != "meta" else value


def _is_in_place(function: Function) -> bool:
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch's default dtype be another one inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_exact(model: torch.nn.Module, tables: Collection[str]) -> None:
    """Prepare a model for `Float64`, in place: its weights become float64.

    `tables` are the modules that compute as they do in the runs.
    """
    use_eager_experts(model)
    model.double()
    for name in tables:
        _keep_float32(model.get_submodule(name))


def _keep_float32(module: torch.nn.Module) -> None:
    """Let a module compute as outside of the mode, and widen what it returns.

    If that depends on the weights, the module is no table but, for instance, a batch norm without weights, and computes as all others.
    """
    module.float()
    forward = module.forward

    def as_in_a_run(*args: Any, **kwargs: Any) -> Any:
        buffers_before = [buffer.clone() for buffer in module.buffers()]
        with default_dtype(torch.float32), torch._C.DisableTorchFunction():
            narrow_args, narrow_kwargs = _cast((args, kwargs), NARROWER)
            output = _cast(forward(*narrow_args, **narrow_kwargs), WIDER)
        if not any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(output)):
            return output
        for buffer, buffer_before in zip(module.buffers(), buffers_before, strict=True):
            buffer.copy_(buffer_before)
        module.double().forward = forward
        return forward(*args, **kwargs)

    module.forward = as_in_a_run


def _cast(values: Any, to: Mapping[torch.dtype, torch.dtype]) -> Any:
    """Return the values, with tensors of each dtype of `to` in the one that it says."""
    return tree_map(
        lambda leaf: leaf.to(to[leaf.dtype]) if isinstance(leaf, torch.Tensor) and leaf.dtype in to else leaf,
        values,
    )
