"""The state of a model beside its parameters and buffers: attributes of its modules, and of objects that these keep.

A pass or the loop may change it.
"""

import collections
import contextlib
import enum
import re
from typing import Any

import numpy
import torch

from lockstep.ground import origin
from lockstep.recorder import divided_attributes
from lockstep.recorder.allowed import CONFIGURATIONS, PACKAGES, package_of
from lockstep.recorder.hashes import digest
from lockstep.recorder.tree import OWN, PLAIN, TREE, Describing, Unnamed
from lockstep.recorder.wrapped import clean

# Types whose values a pass may change
KINDS = (
    *(*PLAIN, float, list, tuple, dict, collections.OrderedDict, collections.deque),
    *(torch.Tensor, numpy.ndarray),
)
# Words in names of values that are about the processes of a run
OF_PROCESSES = re.compile(r"(^|_)(world|rank|ranks|replicas|processes|gpus|nodes)(_|$)")


def state_of(model: torch.nn.Module) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Return attributes of modules that a pass or the loop may change: MODULE:NAME -> (JSON, its tensors).

    Such are a weight that is annealed, a table, or the state of the batch before. They are numbers, texts, tensors
    that are neither parameters nor buffers, and lists, tuples and dicts of them. An object that modules keep, such as
    a configuration, has its attributes or items returned, as MODULE:NAME.KEY, at the place where it is found first.
    """
    describing, states, seen = _StateDescribing(model), {}, set[int]()
    for path, module in model.named_modules():
        for name, value in {**vars(module), **divided_attributes.wholes(module, describing.sizes)}.items():
            entries = {} if id(value) in seen else describing.inside_of(value)
            seen |= {id(value)} if entries else set()
            values = {f".{key}": entry for key, entry in entries.items()} or {"": value}
            for place, inner in ((f"{clean(path)}:{name}{end}", inner) for end, inner in values.items()):
                describing.attributes = {}
                if name not in (*OWN, "gradient_checkpointing"):
                    with contextlib.suppress(Unnamed):
                        states[place] = describing.value(inner, place), describing.attributes
    return states


class _StateDescribing(Describing):
    """Describes values that a pass may change. `value` raises Unnamed for any other."""

    def inside_of(self, value: Any) -> TREE:
        """Return the attributes and items of an object that is described by them, such as a configuration; {} for any other value.

        What is private or secret is left out, and what is about the processes of the run.
        """
        kind = type(value)
        packages = self.packages - PACKAGES | CONFIGURATIONS | {"argparse", "types"}
        is_other = issubclass(kind, (torch.nn.Module, torch.Tensor, enum.Enum))
        if is_other or package_of(kind.__module__) not in packages:
            return {}
        items = dict.items(value) if issubclass(kind, dict) else ()
        entries = {**{k: item for k, item in items if isinstance(k, str)}, **getattr(value, "__dict__", {})}
        # What is private may be a choice of the library, such as how experts are computed. The judge makes it anew.
        return {
            key: entry
            for key, entry in entries.items()
            if not (key.startswith("_") or OF_PROCESSES.search(key.lower()) or origin.is_secret(key))
        }

    def value(self, value: Any, where: str) -> Any:
        # A parameter or buffer, or the id of one
        is_known = (value if type(value) is int else id(value)) in self.tensors
        is_hidden = issubclass(type(value), torch.nn.Module) and id(value) not in self.modules
        if (type(value) not in KINDS and not is_hidden) or is_known:
            raise Unnamed("nothing that a forward pass changes")
        return super().value(value, where)

    def _module(self, module: torch.nn.Module, where: str) -> TREE:
        tensors = [*module.parameters(), *module.buffers()]
        return {**super()._module(module, where), "hash": [digest(tensor) for tensor in tensors]}

    def _tensor(self, tensor: torch.Tensor, where: str) -> TREE:
        return {**super()._tensor(tensor, where), "hash": digest(tensor)}
