"""Rebuild an optimizer of a recorded step with its own class, attributes, settings and state, so that one process can step it."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from lockstep.ground.errors import communicates, first_line
from lockstep.recorder.allowed import package_of
from lockstep.recorder.building import Building
from lockstep.recorder.complex_numbers import as_real, in_width, like
from lockstep.recorder.optimizers import bare, tensors_of
from lockstep.recorder.recorded_step import Optimizer
from lockstep.recorder.recording import Recording
from lockstep.verdict.float64 import Float64
from lockstep.verdict.gpu_arithmetic import release_of

# Settings of a group that say how a step is computed, not what it computes. The replay uses the plain way.
IMPLEMENTATION = {"fused": False, "foreach": False, "capturable": False}
DEEPSPEED_ADAM = ("FusedAdam", "DeepSpeedCPUAdam")
# The class of torch that computes as DeepSpeed's Adam does, by (adam_w_mode, bias_correction) of its groups
DEEPSPEED_WAYS = {(True, True): torch.optim.AdamW, (False, True): torch.optim.Adam}
Weights = Mapping[str, torch.Tensor]


class CannotStep(Exception):
    """One process cannot step an optimizer: its class is not found, needs more than was recorded, or communicates."""


class _RecordedTensors(dict[str, torch.Tensor]):
    """The tensors attribute/KEY, each read by `read(KEY)` when a value refers to it."""

    def __init__(self, read: Callable[[str], torch.Tensor]):
        super().__init__()
        self.read = read

    def __missing__(self, name: str) -> torch.Tensor:
        return self.read(name.removeprefix("attribute/"))


class Stepped:
    """An optimizer after a step, and its parameters by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Weights):
        self.optimizer, self.parameters = optimizer, parameters

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return the optimizer's state of a parameter, by KEY. Numbers are returned as tensors, and complex ones as pairs."""
        state = tensors_of(self.optimizer.state.get(self.parameters[name], {}))
        return {key: as_real(value) for key, value in state.items()}

    def value(self, name: str) -> torch.Tensor:
        """Return a parameter. Complex numbers are pairs."""
        return as_real(self.parameters[name].detach())

    def settings(self, name: str) -> dict[str, Any]:
        parameter = self.parameters[name]
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(other is parameter for other in group["params"]))


class Replay:
    """Steps an optimizer of a recorded step again. Raises CannotStep if that is not possible.

    `weights` are those before the step. `weights` and `gradients` are whole tensors, by parameter. `clipped`
    is the factor that the run multiplied the gradients by after they were recorded.
    """

    def __init__(
        self,
        recording: Recording,
        step: int,
        optimizer: Optimizer,
        weights: Weights,
        gradients: Weights,
        clipped: float,
    ):
        self.recording, self.number, self.optimizer = recording, step, optimizer
        self.weights, self.gradients, self.clipped = weights, gradients, clipped
        with _as_cannot_step():
            self.kind = self._optimizer_class()
        # DeepSpeed's optimizers lack some settings of torch's, and have attributes of their own.
        self.defaults = self.kind([torch.empty(1)]).defaults if optimizer.is_of_deepspeed else {}
        self.in_float32 = any(map(self._is_in_float32, optimizer.groups))

    def _is_in_float32(self, group: dict[str, Any]) -> bool:
        """Whether the run computed with a group's settings in float32.

        DeepSpeed does, and so do torch's fused Adams on a GPU since 2.11.
        """
        origin = self.recording.origin
        if self.optimizer.is_of_deepspeed or not (group.get("fused") and "betas" in group):
            return self.optimizer.is_of_deepspeed
        version = release_of(origin.versions["torch"])
        is_narrow = all(
            self.weights[name].dtype != torch.float64 for name in group["params"] if name in self.weights
        )
        return origin.device.startswith("cuda") and version >= (2, 11) and is_narrow

    def step(self, names: list[str], *, exact: bool, moved: float = 0.0) -> "Stepped":
        """Make one step of the optimizer, as if it held the parameters `names` alone.

        `exact`: in float64, else in the run's own dtypes. `moved` perturbs the step: gradients are multiplied
        by 1 + moved, tensors of the state by 1 - moved.
        """
        building = self._new_building()
        parameters = building.parameters
        for name in names:
            weight = self.weights[name]
            dtype = torch.float64 if exact and weight.is_floating_point() else weight.dtype
            parameter = self.recording.skeleton.get_parameter(name)
            parameters[name] = torch.nn.Parameter(like(weight.to(dtype, copy=True), parameter))
            gradient = self.gradients[name].to(dtype, copy=True).mul_(self.clipped * (1 + moved))
            gradient = like(gradient, parameter)
            # SparseAdam updates only the rows that have a gradient.
            parameters[name].grad = gradient.to_sparse(1) if self.kind is torch.optim.SparseAdam else gradient
        with _as_cannot_step():
            closure = inspect.signature(self.kind.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise CannotStep("it needs a closure, which calls the model again")
            optimizer = self._build_optimizer(building, exact, moved)
            with _as_one_process(), Float64() if exact else contextlib.nullcontext():
                rng_state = torch.get_rng_state()
                optimizer.step()
            for parameter in parameters.values():
                parameter.grad = None
            if not torch.equal(rng_state, torch.get_rng_state()):
                raise CannotStep("it draws random numbers")
        return Stepped(optimizer, parameters)

    def _new_building(self) -> Building:
        building = Building({}, self.recording.tree["scripts"])
        building.packages.add(package_of(self.optimizer.kind))
        # Some optimizers keep modules, whose parameters have settings of their own.
        building.modules = dict(self.recording.skeleton.named_modules())
        return building

    def _optimizer_class(self) -> Any:
        """Return the optimizer's class; of an optimizer of DeepSpeed, the class of torch that computes the same."""
        class_name = self.optimizer.kind
        if not self.optimizer.is_of_deepspeed:
            if "<locals>" in class_name:
                raise CannotStep("its class is defined inside a function")
            return self._new_building().find(class_name)
        modes = {(group.get("adam_w_mode"), group.get("bias_correction")) for group in self.optimizer.groups}
        matching = [torch_class for mode, torch_class in DEEPSPEED_WAYS.items() if modes == {mode}]
        if not matching or class_name.partition(":")[2] not in DEEPSPEED_ADAM:
            raise CannotStep("of DeepSpeed's own, only the update of its Adams can be computed in float64")
        return matching[0]

    @property
    def is_of_torch(self) -> bool:
        """Whether the class is one of torch's. The update of a parameter then needs no other parameter."""
        return self.kind.__module__.startswith("torch.optim")

    def _build_optimizer(self, building: Building, exact: bool, moved: float) -> torch.optim.Optimizer:
        """Return the optimizer as it was before the step. `exact` and `moved` are those of `step`.

        No constructor is called, as for modules: its arguments are not known.
        """

        def read(kind: str, owner: object, factor: float) -> Callable[[str], torch.Tensor]:
            """Return a function that reads the recorded tensor of a key, times `factor`.

            `kind` is "attribute", and `owner` the optimizer's number, or "state", and `owner` the parameter.
            """

            def tensor(key: str) -> torch.Tensor:
                whole = self.recording.whole(self.number, f"{kind}/{key}/{owner}")[0]
                value = (in_width(whole, torch.float64) if exact else whole).clone()
                value = value * factor if factor != 1 and value.ndim and value.is_floating_point() else value
                return like(value, building.parameters[str(owner)]) if kind == "state" else value

            return tensor

        optimizer = self.kind.__new__(self.kind)
        vars(optimizer).update(bare())
        building.tensors = _RecordedTensors(read("attribute", self.optimizer.number, 1))
        attrs = {"defaults": self.defaults} if self.defaults else _values(building, self.optimizer.attributes)
        vars(optimizer).update(attrs)
        optimizer.param_groups = []
        for group in self.optimizer.groups:
            recorded = {key: value for key, value in group.items() if key != "params"}
            settings = _values(building, recorded)
            if self._is_in_float32(group):
                settings = self.defaults | tree_map(_to_float32, settings)
            settings |= {key: value for key, value in IMPLEMENTATION.items() if key in settings}
            params = [building.parameters[name] for name in group["params"] if name in building.parameters]
            optimizer.param_groups.append({**settings, "params": params})
        for name, parameter in building.parameters.items():
            building.tensors = _RecordedTensors(read("state", name, 1 - moved))
            state = _values(building, self.optimizer.state.get(name, {}))
            if state:
                optimizer.state[parameter] = state
        return optimizer


def _to_float32(value: Any) -> Any:
    """Round a setting to float32, so that 1 - 0.999 is off by 1.3e-5.

    DeepSpeed's kernels are given settings in float32. Torch's fused Adams compute with them in float32 on a
    GPU.
    """
    return float(torch.tensor(value)) if isinstance(value, float) else value


def _values(building: Building, said: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the JSON `said` of a recording stands for."""
    return {key: building.value(value) for key, value in said.items()}


@contextlib.contextmanager
def _as_cannot_step() -> Iterator[None]:
    """Turn any error into CannotStep."""
    try:
        yield
    except CannotStep:
        raise
    except Exception as error:  # a user's class may raise anything
        why = "; it communicates" * communicates(error)
        raise CannotStep(
            f"one process cannot step it again ({type(error).__name__}: {first_line(error)}){why}"
        ) from error


@contextlib.contextmanager
def _as_one_process() -> Iterator[None]:
    """Compile nothing, and let there be no other ranks."""
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        world, dist.group.WORLD = dist.group.WORLD, None
        try:
            yield
        finally:
            dist.group.WORLD = world
