"""A model's module tree as JSON: classes, attributes, shapes, which parameters are tied. The same model is built from it again.

Nothing is pickled, and no constructor is called: a module is made again from its class, its attributes and its children. So a
tree keeps what was done to a model after it was built, such as adapters of LoRA. Hooks and wrappers are left out.
"""

import argparse
import collections
import contextlib
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from lockstep.ground import origin, user_file
from lockstep.ground.errors import UserError
from lockstep.recorder import (
    deepspeed_layers,
    divided_attributes,
    functions,
    local_classes,
    process_group,
    quantized,
)
from lockstep.recorder.allowed import PACKAGES, is_allowed, package_of
from lockstep.recorder.names import MAIN, globals_of, name_of, named, script_of, source_of
from lockstep.recorder.script import Script, names_of
from lockstep.recorder.wrapped import clean

# Attributes that are not written: those of torch.nn.Module itself. Parameters, buffers and children are written apart, hooks not at all.
# Nor is transformers' note that it has put hooks on the modules. So it puts them on those of the model that is built again.
OWN = {*vars(torch.nn.Module()), "forward", "_output_capturing_hooks_installed"}
# How attributes begin that FSDP2, replicate and checkpoint put on a module that they wrap
OF_WRAPPERS = "__composable_api"
# Elements of an array of numpy: a larger one is data, not a table
MOST_OF_AN_ARRAY = 1 << 20
# The package of hooks that compute a weight
WEIGHT_HOOKS = "torch.nn.utils."
PLAIN = (type(None), bool, int, str)
# Types whose values are no objects with numbers and texts of their own
NO_OBJECTS = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.Tensor,
)
SEQUENCES: dict[str, Callable[[list], Any]] = {"tuple": tuple, "list": list, "set": set, "size": torch.Size}
TREE = dict[str, Any]


def class_of(module: torch.nn.Module) -> type:
    """Return the class that a module was built of. Raises UserError for a class that no file has by its name.

    FSDP2 and DTensor's checkpointing derive another class, which has this one as its last base. A class that was derived while the
    program ran, and has the name of its base, is a patch: the class that the file has was meant.
    """
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = parametrize.type_before_parametrizations(module)
    while (defined := named(kind)) is not kind or kind.__module__.startswith("torch.distributed"):
        if local_classes.is_local(kind) and source_of(kind):  # type: ignore[arg-type] # classes have a hash
            return kind
        if isinstance(defined, type) and defined is not kind and issubclass(kind, defined):
            return defined
        if len(kind.__bases__) < 2 or not issubclass(kind.__bases__[-1], torch.nn.Module):
            raise UserError(
                f"{kind.__module__}.{kind.__qualname__}: no file has this class by its name, so the model cannot be built again; "
                "move the class to the top of a file"
            )
        kind = kind.__bases__[-1]
    return kind


class Describing:
    """Describes a model's modules, and values that belong to them, as JSON. lockstep/recorder/building.py makes them again."""

    def __init__(self, model: torch.nn.Module):
        scripted = next(
            (name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None
        )
        if scripted is not None:
            raise UserError(
                f"{scripted or 'the model'} was made by torch.jit, which leaves no class that it could be built of again; record the module that it was made of"
            )
        self.modules = {id(module): clean(name) for name, module in model.named_modules()}
        # Not the file of AutoTP's layers: like these, what else AutoTP put into the model, such as its loss function, is left out.
        bare = [module for module in model.modules() if "_checkpoint_wrapped_module" not in module._modules]
        files = {class_of(module).__module__ for module in bare} - {deepspeed_layers.FILE}
        self.kind = class_of(model)
        self.packages = PACKAGES | {package_of(file) for file in files}
        # By id, the names of parameters and buffers
        self.tensors: dict[int, str] = {}
        for named_tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in named_tensors():
                self.tensors.setdefault(id(tensor), clean(name))
        # By id, the numbers of the objects that were described
        self.objects: dict[int, int] = {}
        self.sizes = divided_attributes.sizes_of(model)
        # The ids of functions that are being described
        self.inside: set[int] = set()
        # Names of the script that functions without a name read
        self.read_of_script: set[str] = set()
        # The objects that were described: they are kept alive, so that no id is given twice
        self.kept: list[object] = []
        # Values that have no name, as "PLACE: why"
        self.left_out: list[str] = []
        # Tensors that are neither parameters nor buffers, by place
        self.attributes: dict[str, torch.Tensor] = {}

    def module(self, module: torch.nn.Module, name: str) -> TREE:
        """Return a module and its children as JSON."""
        wrapped = module._modules.get("_checkpoint_wrapped_module") or module._modules.get("_orig_mod")
        if wrapped is not None:
            return self.module(wrapped, name)
        kind = class_of(module)
        values = {
            key: value
            for key, value in vars(module).items()
            if key not in OWN and not key.startswith(OF_WRAPPERS)
        }
        if _is_forward(vars(module).get("forward"), module):
            values["forward"] = vars(module)["forward"]
        # Around a part of the model
        if issubclass(kind, DistributedDataParallel):
            kind, values = Passed, {}
        if kind.__module__ == deepspeed_layers.FILE:
            kind, values = deepspeed_layers.before(module)
        if quantized.is_one(module._parameters.get("weight")):
            kind, values = quantized.before(module)
        values |= divided_attributes.wholes(module, self.sizes)
        attributes = self.values(values, name)
        for key in values.keys() - attributes.keys():
            # Libraries put private attributes there, such as a loss for shards of the vocabulary. A class works without them.
            read = {} if key.startswith("_") else _numbers_read(values[key], kind)
            attributes |= {key: {"left": read}} if read else {}
        # Hooks that compute a weight before each call, as those of weight_norm do
        hooks = [
            self._object(hook, name)
            for hook in module._forward_pre_hooks.values()
            if type(hook).__module__.startswith(WEIGHT_HOOKS)
        ]
        if vars(module).get("_is_expert_parallel"):
            # The number that transformers keeps is that of this rank's experts.
            experts: Any = next(iter(module._parameters.values()))
            attributes |= {"_is_expert_parallel": False, "num_experts": experts.shape[0]}
        tensors = {
            field: {
                key: None if tensor is None else self.parameter(tensor)
                for key, tensor in getattr(module, f"_{field}").items()
            }
            for field in ("parameters", "buffers")
        }
        children = {
            key: None if child is None else self.module(child, clean(f"{name}.{key}" if name else key))
            for key, child in module._modules.items()
        }
        try:
            local = self._local_class(kind, name) if local_classes.is_local(kind) else None
        except Unnamed as error:
            raise UserError(
                f"{kind.__module__}.{kind.__qualname__}: a function defines this class, and it cannot be made again ({error}); "
                "move the class to the top of a file"
            ) from error
        return {
            "class": name_of(kind),
            "local_class": local,
            "attributes": attributes,
            **tensors,
            "children": children,
            "weight_hooks": hooks,
        }

    def parameter(self, tensor: torch.Tensor) -> TREE:
        """Return a parameter or buffer as JSON, with the shape that it has in the whole model."""
        values = quantized.values(tensor)
        shape: Any = deepspeed_layers.noted(tensor).get("original_shape") or getattr(
            tensor, "ds_shape", values.shape
        )
        return {
            "is": self.tensors[id(tensor)],
            "shape": list(shape),
            "dtype": str(values.dtype),
            "requires_grad": tensor.requires_grad,
        }

    def scripts(self) -> TREE:
        """Return, by the path of the running script, what its modules and optimizers read of it.

        Such are settings from the command line.
        """
        bases = (torch.nn.Module, torch.optim.Optimizer)
        namespace = globals_of(self.kind)
        names = {
            kind.__name__
            for kind in (self.kind, *namespace.values())
            if isinstance(kind, type) and issubclass(kind, bases) and kind.__module__ in MAIN
        }
        path = script_of(namespace)
        names |= self.read_of_script
        if not names or not path.is_file():
            return {}
        values: TREE = {}

        def has_value(name: str) -> bool:
            """Whether a global of the script has a value that JSON can name. It is then kept in `values`."""
            if name.startswith("__") or name not in namespace:
                return False
            value = namespace[name]
            if isinstance(value, (type, types.FunctionType, types.ModuleType, torch.jit.ScriptFunction)):
                return False
            if isinstance(value, argparse.Namespace):
                value = argparse.Namespace(**origin.without_secret_values(vars(value)))
            # The script may run before the model's attributes are set: its objects are described anew.
            self.objects = {}
            # A value that JSON cannot name is computed by the judge as the script does.
            with contextlib.suppress(Unnamed):
                values[name] = self.value(value, f"script.{name}")
            return name in values

        Script(path, path.read_bytes()).needed(names, has_value)
        return {str(path): {"package": namespace.get("__package__"), "values": values}}

    def values(self, values: dict[str, Any], where: str) -> TREE:
        """Return values by name as JSON. What JSON cannot name is left out."""
        trees: TREE = {}
        for key, value in values.items():
            try:
                trees[key] = self.value(value, f"{where}.{key}".removeprefix("."))
            except Unnamed as error:
                self.left_out.append(f"{where}.{key}: {error}")
        return trees

    def value(self, value: Any, where: str) -> Any:
        """Return a value as JSON. `where` is its place, such as MODULE.KEY. Raises Unnamed for what JSON cannot name."""
        if type(value) is int and value in self.tensors:
            return {"id": self.tensors[value]}
        if isinstance(value, PLAIN) and type(value) in PLAIN:
            return value
        if isinstance(value, float):
            # It may be a float64 of numpy.
            value = float(value)
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return self._list(value, where)
        for kind, make in SEQUENCES.items():
            if type(value) is make:
                return {kind: self._list(value, where)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"namedtuple": self._named(type(value)), "values": self._list(value, where)}
        if type(value) in (dict, collections.OrderedDict):
            return {
                "dict": [self._list(pair, f"{where}.{number}") for number, pair in enumerate(value.items())]
            }
        if type(value) is collections.deque:
            return {"deque": self._list(value, where), "maxlen": value.maxlen}
        if type(value) is collections.defaultdict:
            return {"defaultdict": [self.value(part, where) for part in (value.default_factory, dict(value))]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._of_numpy(value, where)
        if process_group.is_group(value):
            return {"process group": None}
        if isinstance(value, torch.nn.Module):
            return self._module(value, where)
        # An enumeration of C++ has __members__ alone.
        if isinstance(value, enum.Enum) or hasattr(type(value), "__members__"):
            return {"enum": self._named(type(value)), "name": value.name}
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
            return {"partial": [self.value(part, where) for part in parts]}
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            if getattr(class_of(value.__self__), value.__name__, None) is not value.__func__:
                raise Unnamed(f"the method {value.__name__}, which its class does not have")
            return {"method": [self._module(value.__self__, where), value.__name__]}
        if isinstance(value, torch.jit.ScriptFunction):
            # The judge turns scripting off, so the name stands for the function that was scripted.
            function = value._torchdynamo_inline  # type: ignore[attr-defined]
            return {"named": self._named(function, value)}
        if isinstance(value, type) and local_classes.is_local(value):
            return {"local class": name_of(value), **self._local_class(value, where)}
        if functions.is_nameless(value) and package_of(value.__module__ or "") in self.packages:
            return self._function(value, where)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return {"named": self._named(value)}
        if typing.get_origin(value) is not None or type(value).__module__ == "typing":
            return self._annotation(value, where)
        return self._object(value, where)

    def _function(self, function: types.FunctionType, where: str) -> TREE:
        if id(function) in self.inside:
            raise Unnamed("a function that encloses itself")
        self.inside.add(id(function))
        try:
            described = functions.described(function, self.value, where)
        except ValueError as error:
            raise Unnamed(str(error)) from error
        finally:
            self.inside.remove(id(function))
        if function.__module__ in MAIN:
            self.read_of_script |= {*names_of(function.__code__)}
        return {"function": name_of(function).partition(":")[0], **described}

    def _local_class(self, kind: type, where: str) -> TREE:
        """Return a class that a function defines as JSON. Raises Unnamed if it cannot be made again."""
        source = source_of(kind)
        if not source:
            raise Unnamed(f"{kind.__qualname__}, which a function of another package defines")
        try:
            described = local_classes.described(kind, source, lambda value: self.value(value, where))
        except ValueError as error:
            raise Unnamed(str(error)) from error
        if kind.__module__ in MAIN:
            self.read_of_script |= local_classes.names_read(source, kind.__qualname__)
        return described

    def _annotation(self, value: Any, where: str) -> TREE:
        """Return an annotation, such as Union or Union[Tensor, None], as JSON. A module may keep those of a method."""
        generic = typing.get_origin(value)
        if generic is None:
            name = str(value).removeprefix("typing.")
            if getattr(typing, name, None) is not value:
                raise Unnamed(f"{value}, which typing does not have")
            return {"named": f"typing:{name}"}
        named_generic = typing.Union if generic is types.UnionType else generic
        arguments = tuple(None if kind is types.NoneType else kind for kind in typing.get_args(value))
        return {"annotation": [self.value(part, where) for part in (named_generic, arguments)]}

    def _list(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.value(element, f"{where}.{number}") for number, element in enumerate(values)]

    def _named(self, value: Any, found: Any = None) -> str:
        """Return the name of a class or function. Raise Unnamed for one that `Building.named` of lockstep/recorder/building.py does not find again.

        `found` is what has its name, if that is not itself.
        """
        name = name_of(value)
        if value.__module__ in MAIN:
            is_known = value.__module__ in self.packages
        else:
            is_known = is_allowed(value, name, self.packages)
        if not is_known or named(value) is not (found or value):
            raise Unnamed(
                f"{getattr(value, '__qualname__', value)} is of no package of the model's own classes, or has no name there"
            )
        return name

    def _module(self, module: torch.nn.Module, where: str) -> TREE:
        if id(module) in self.modules:
            return {"module": self.modules[id(module)]}
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise Unnamed(
                "a module that is no part of the model, as in a list: torch.nn.ModuleList makes it one; requires_grad_(False) says that it is not trained"
            )
        # Such as a teacher, which a list hides from the optimizer. Its tensors are like those of an attribute.
        tree, tensors = describe(module)
        tensors |= {f"weight/{clean(name)}": parameter for name, parameter in module.named_parameters()}
        self.attributes |= {f"{clean(where)}.{name}": tensor for name, tensor in tensors.items()}
        evaluated = [clean(name) for name, inner in module.named_modules() if not inner.training]
        return {"hidden": tree, "at": clean(where), "tensors": [*tensors], "evaluated": evaluated}

    def _tensor(self, tensor: torch.Tensor, where: str) -> TREE:
        if id(tensor) in self.tensors:
            return {"tensor": self.tensors[id(tensor)]}
        if tensor.layout is torch.sparse_coo:
            parts = {"indices": tensor._indices(), "values": tensor._values()}
            trees = {name: self._tensor(part, f"{where}.{name}") for name, part in parts.items()}
            return {"sparse": trees, "shape": [*tensor.shape], "is_coalesced": tensor.is_coalesced()}
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not is_plain and not isinstance(tensor, DTensor):
            raise Unnamed(f"a {type(tensor).__name__} ({tensor.layout})")
        self.attributes[clean(where)] = tensor
        return {"attribute": clean(where)}

    def _of_numpy(self, value: numpy.ndarray | numpy.generic, where: str) -> Any:
        if isinstance(value, numpy.generic):
            return self.value(value.item(), where)
        # A memmap, for instance, is data.
        if type(value) is not numpy.ndarray or value.dtype.kind not in "bif" or value.size > MOST_OF_AN_ARRAY:
            raise Unnamed(f"a {type(value).__name__} of {value.size} elements of {value.dtype}")
        return {"array": self._tensor(torch.from_numpy(numpy.ascontiguousarray(value)), where)}

    def _object(self, value: object, where: str) -> TREE:
        """Return an object with attributes, and perhaps items, such as a config, as JSON. An object that is in several places stays one."""
        if id(value) in self.objects:
            return {"same": self.objects[id(value)]}
        kind = type(value)
        name = self._named(kind)
        # What C++ holds, such as a scripted function, is in no attribute.
        is_of_c = kind.__module__ == "builtins" or type(kind).__name__ == "pybind11_type"
        if is_of_c or not hasattr(value, "__dict__"):
            raise Unnamed(f"a {kind.__qualname__}")
        number = self.objects[id(value)] = len(self.kept)
        self.kept.append(value)
        tree = {"object": name, "number": number, "attributes": self.values(vars(value), where)}
        if isinstance(value, dict):
            items = self.values({key: item for key, item in dict.items(value) if isinstance(key, str)}, where)
            tree["items"] = [*items.items()]
        elif isinstance(value, list):
            tree["elements"] = self._list(list.__iter__(value), where)
        return tree


def _numbers_read(value: object, kind: type) -> TREE:
    """Return the numbers and texts of an object that is left out, such as a tokenizer, that a module's class may read.

    They are found by the names that the code of the class has.
    """
    if isinstance(value, NO_OBJECTS):
        return {}
    read: TREE = {}
    attributes = (
        attribute for base in kind.__mro__ for attribute in vars(base).values() if base is not torch.nn.Module
    )
    codes = [method.__code__ for method in attributes if isinstance(method, types.FunctionType)]
    for name in {
        name for code in codes for inner in (code, *functions.codes_in(code)) for name in inner.co_names
    }:
        # A property may raise anything.
        with contextlib.suppress(Exception):
            constant = getattr(value, name)
            read |= {name: constant} if type(constant) in (bool, int, float, str) else {}
    return read


def _is_forward(forward: Any, module: torch.nn.Module) -> bool:
    """Whether a module was given a function as its `forward` that is a method of its class, or knows other modules, such as an adapter's.

    Any other function is a patch, like a hook.
    """
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        return getattr(class_of(module), forward.__name__, None) is forward.__func__
    if not isinstance(forward, types.FunctionType):
        return False
    values = [
        *functions.enclosed(forward).values(),
        *(forward.__defaults__ or ()),
        *(forward.__kwdefaults__ or {}).values(),
    ]
    return any(isinstance(value, torch.nn.Module) and value is not module for value in values)


def nodes(tree: TREE) -> Iterator[TREE]:
    """Yield the tree of a module, and those of all modules inside."""
    yield tree
    for child in tree["children"].values():
        yield from () if child is None else nodes(child)


class Passed(torch.nn.Module):
    """The module that DDP around a part of a model is built again as."""

    module: torch.nn.Module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)


class Unnamed(Exception):
    """A value that JSON cannot name."""


def describe(model: torch.nn.Module) -> tuple[TREE, dict[str, torch.Tensor]]:
    """Return a model's tree, and the tensors that belong to it: buffers, and attributes that are tensors.

    Raises UserError for a class that no file has by its name.
    """
    describing = Describing(model)
    tree = describing.module(model, "")
    scripts = describing.scripts()
    buffers = {f"buffer/{clean(name)}": buffer for name, buffer in model.named_buffers()}
    attributes = {f"attribute/{name}": tensor for name, tensor in describing.attributes.items()}
    whole_model = {
        "left_out": describing.left_out,
        "paths": user_file.own_paths(),
        "scripts": scripts,
    }
    return {**tree, **whole_model}, {**buffers, **attributes}
