"""An optimizer of a recorded step, built again with its own class, attributes, settings and state, so that one process can step it."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from lockstep.ground.errors import communicates, first_line
from lockstep.recorder import tree
from lockstep.recorder.building import Building
from lockstep.recorder.optimizers import bare, tensors_of
from lockstep.recorder.recorded_step import Optimizer
from lockstep.recorder.recording import Recording
from lockstep.verdict.float64 import Float64
from lockstep.verdict.gpu_arithmetic import release_of

# Of a group: how a step is computed, not what
IMPLEMENTATION = {"fused": False, "foreach": False, "capturable": False}
DEEPSPEED_ADAM = ("FusedAdam", "DeepSpeedCPUAdam")
# Of its groups (adam_w_mode, bias_correction)
DEEPSPEED_WAYS = {(True, True): torch.optim.AdamW, (False, True): torch.optim.Adam}
Weights = Mapping[str, torch.Tensor]


class CannotStep(Exception):
    """Why one process cannot step an optimizer: its class is not found, needs more than was recorded, or communicates."""


class _Recorded(dict[str, torch.Tensor]):
    """Tensors that are read when a value refers to them, by attribute/KEY."""

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
        """KEY -> what is kept of a parameter; a number as a tensor, too."""
        return tensors_of(self.optimizer.state.get(self.parameters[name], {}))

    def settings(self, name: str) -> dict[str, Any]:
        own = self.parameters[name]
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(one is own for one in group["params"]))


class Replay:
    """Raises CannotStep. `weights` and `gradients` are whole; the gradients were multiplied with `clipped` after they were recorded."""

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
        with _understood():
            self.kind = self._class()
        # DeepSpeed's have not all settings of torch's, and attributes of their own
        self.defaults = self.kind([torch.empty(1)]).defaults if optimizer.is_of_deepspeed else {}
        self.in_float32 = any(map(self._is_in_float32, optimizer.groups))

    def _is_in_float32(self, group: dict[str, Any]) -> bool:
        """Whether a group's settings are float32: those of DeepSpeed, and of torch's fused Adams on a GPU since 2.11."""
        origin = self.recording.origin
        if self.optimizer.is_of_deepspeed or not (group.get("fused") and "betas" in group):
            return self.optimizer.is_of_deepspeed
        version = release_of(origin.versions["torch"])
        single = all(
            self.weights[name].dtype != torch.float64 for name in group["params"] if name in self.weights
        )
        return origin.device.startswith("cuda") and version >= (2, 11) and single

    def step(self, names: list[str], *, exact: bool, moved: float = 0.0) -> "Stepped":
        """One step of the optimizer, as if it held these parameters alone.

        `exact`: in float64, else in the run's own dtypes. `moved`: gradients are this much larger, and state is this much smaller.
        """
        building = self._building()
        own = building.parameters
        for name in names:
            weight = self.weights[name]
            dtype = torch.float64 if exact and weight.is_floating_point() else weight.dtype
            own[name] = torch.nn.Parameter(weight.to(dtype, copy=True))
            gradient = self.gradients[name].to(dtype, copy=True).mul_(self.clipped * (1 + moved))
            # SparseAdam updates the rows that have a gradient
            own[name].grad = gradient.to_sparse(1) if self.kind is torch.optim.SparseAdam else gradient
        with _understood():
            optimizer = self._built(building, exact, moved)
            with _one_process(), Float64() if exact else contextlib.nullcontext():
                before = torch.get_rng_state()
                optimizer.step()
            for parameter in own.values():
                parameter.grad = None
            if not torch.equal(before, torch.get_rng_state()):
                raise CannotStep("it draws random numbers")
        return Stepped(optimizer, own)

    def _building(self) -> Building:
        building = Building({}, self.recording.tree["scripts"])
        building.packages.add(tree.package_of(self.optimizer.kind))
        # Some keep modules, whose parameters have settings of their own.
        building.modules = dict(self.recording.skeleton.named_modules())
        return building

    def _class(self) -> Any:
        """The class, or the one of torch that DeepSpeed's computes as."""
        kind = self.optimizer.kind
        if not self.optimizer.is_of_deepspeed:
            if "<locals>" in kind:
                raise CannotStep("its class is defined inside a function")
            return self._building().find(kind)
        ways = {(one.get("adam_w_mode"), one.get("bias_correction")) for one in self.optimizer.groups}
        found = [torch_kind for way, torch_kind in DEEPSPEED_WAYS.items() if ways == {way}]
        if not found or kind.partition(":")[2] not in DEEPSPEED_ADAM:
            raise CannotStep("of DeepSpeed's own, only the update of its Adams can be computed in float64")
        return found[0]

    @property
    def is_of_torch(self) -> bool:
        """Each update then needs its own parameter alone."""
        return self.kind.__module__.startswith("torch.optim")

    def _cast(self, tensor: torch.Tensor, exact: bool) -> torch.Tensor:
        return tensor.double() if exact and tensor.is_floating_point() else tensor

    def _built(self, building: Building, exact: bool, moved: float) -> torch.optim.Optimizer:
        """No constructor is called, as for modules: what it would ask for is not known."""

        def read(kind: str, of: object, factor: float) -> Callable[[str], torch.Tensor]:
            def tensor(key: str) -> torch.Tensor:
                whole = self.recording.whole(self.number, f"{kind}/{key}/{of}")[0]
                found = self._cast(whole, exact).clone()
                return found * factor if factor != 1 and found.ndim and found.is_floating_point() else found

            return tensor

        optimizer = self.kind.__new__(self.kind)
        vars(optimizer).update(bare())
        building.tensors = _Recorded(read("attribute", self.optimizer.number, 1))
        own = {"defaults": self.defaults} if self.defaults else _values(building, self.optimizer.attributes)
        vars(optimizer).update(own)
        optimizer.param_groups = []
        for group in self.optimizer.groups:
            said = {key: one for key, one in group.items() if key != "params"}
            values = _values(building, said)
            if self._is_in_float32(group):
                values = self.defaults | tree_map(_float32, values)
            values |= {key: one for key, one in IMPLEMENTATION.items() if key in values}
            held = [building.parameters[name] for name in group["params"] if name in building.parameters]
            optimizer.param_groups.append({**values, "params": held})
        for name, parameter in building.parameters.items():
            building.tensors = _Recorded(read("state", name, 1 - moved))
            state = _values(building, self.optimizer.state.get(name, {}))
            if state:
                optimizer.state[parameter] = state
        return optimizer


def _float32(value: Any) -> Any:
    """What the kernels of DeepSpeed are given, and those of torch's fused Adams on a GPU compute with: there, 1 - 0.999 is off by 1.3e-5."""
    return float(torch.tensor(value)) if isinstance(value, float) else value


def _values(building: Building, said: dict[str, Any]) -> dict[str, Any]:
    return {key: building.value(one) for key, one in said.items()}


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except CannotStep:
        raise
    except Exception as error:  # a class of a user's may raise anything
        why = "; it communicates" * communicates(error)
        raise CannotStep(
            f"one process cannot step it again ({type(error).__name__}: {first_line(error)}){why}"
        ) from error


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Nothing is compiled, and there are no other ranks."""
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        world, dist.group.WORLD = dist.group.WORLD, None
        try:
            yield
        finally:
            dist.group.WORLD = world
