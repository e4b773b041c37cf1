"""What a pass or a loop may change of a model beside its parameters and buffers: attributes of its modules, and of what these keep."""

import collections
import contextlib
import enum
import re
from typing import Any

import torch

from lockstep.ground import origin
from lockstep.recorder import divided
from lockstep.recorder.hashes import digest
from lockstep.recorder.tree import (
    CONFIGURATIONS,
    OWN,
    PACKAGES,
    PLAIN,
    TREE,
    Describing,
    Unnamed,
    package_of,
)
from lockstep.recorder.wrapped import clean

OF_PROCESSES = re.compile(r"(^|_)(world|rank|ranks|replicas|processes|gpus|nodes)(_|$)")  # in names


def state_of(model: torch.nn.Module) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Attributes of modules that a pass or a loop may change, such as a weight that is annealed, a table, or the state of the batch before.

    Numbers, texts, tensors that are neither parameters nor buffers, and lists, tuples and dicts of them: MODULE:NAME -> (JSON, its tensors).
    Of an object that modules keep, such as a configuration, the same of its attributes or items: MODULE:NAME.KEY, where it is first.
    """
    describing, found, seen = _State(model), {}, set[int]()
    for name, module in model.named_modules():
        for key, value in {**vars(module), **divided.wholes(module, describing.sizes)}.items():
            inside = {} if id(value) in seen else describing.inside_of(value)
            seen |= {id(value)} if inside else set()
            values = {f".{one}": of for one, of in inside.items()} or {"": value}
            for place, one in ((f"{clean(name)}:{key}{end}", one) for end, one in values.items()):
                describing.attributes = {}
                if key not in (*OWN, "gradient_checkpointing"):
                    with contextlib.suppress(Unnamed):
                        found[place] = describing.value(one, place), describing.attributes
    return found


class _State(Describing):
    def inside_of(self, value: Any) -> TREE:
        """The attributes and items of an object that is described by them, such as a configuration, but for what is of a rank."""
        kind = type(value)
        own = self.packages - PACKAGES | CONFIGURATIONS | {"argparse", "types"}
        is_other = issubclass(kind, (torch.nn.Module, torch.Tensor, enum.Enum))
        if is_other or package_of(kind.__module__) not in own:
            return {}
        items = dict.items(value) if issubclass(kind, dict) else ()
        every = {**{key: one for key, one in items if isinstance(key, str)}, **getattr(value, "__dict__", {})}
        # What is private may be a choice of the library's, which the judge makes anew, such as how experts are computed.
        return {
            key: one
            for key, one in every.items()
            if not (key.startswith("_") or OF_PROCESSES.search(key.lower()) or origin.is_secret(key))
        }

    def value(self, value: Any, where: str) -> Any:
        kinds = (*PLAIN, float, list, tuple, dict, collections.OrderedDict, torch.Tensor)
        known = (value if type(value) is int else id(value)) in self.tensors
        if type(value) not in kinds or known:
            raise Unnamed("nothing that a forward pass changes")
        return super().value(value, where)

    def _tensor(self, tensor: torch.Tensor, where: str) -> TREE:
        return {**super()._tensor(tensor, where), "hash": digest(tensor)}
