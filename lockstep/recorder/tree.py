"""A model's module tree as JSON: classes, attributes, shapes, which parameters are tied. The same model is built from it again.

Nothing is pickled, and no constructor is called: a module is made of its class, its attributes and its children, as it was. So a tree
keeps what was done to a model after it was built, such as adapters of LoRA. Hooks and wrappers are left out.
"""

import argparse
import collections
import contextlib
import enum
import functools
import importlib
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from lockstep.ground import origin, user_file
from lockstep.ground.errors import UserError
from lockstep.recorder import deepspeed_layers, divided, functions, process_group, quantized
from lockstep.recorder.script import Script, names_of
from lockstep.recorder.wrapped import clean

# Of torch.nn.Module itself; its parameters, buffers and children are written apart, hooks not at all. Nor is transformers' note that
# it has put hooks on the modules, so it will put them on those of the model that is built again.
OWN = {*vars(torch.nn.Module()), "forward", "_output_capturing_hooks_installed"}
# Of FSDP2, replicate and checkpoint: what they hold of a module they wrap
OF_WRAPPERS = "__composable_api"
CONFIGURATIONS = {"addict", "easydict", "ml_collections", "omegaconf", "yacs"}
PACKAGES = CONFIGURATIONS | {
    "argparse",
    "builtins",
    "collections",
    "functools",
    "inspect",
    "math",
    "torch",
    "types",
    "typing",
}  # whose functions and classes a tree may name, beside the model's own
# The script that runs, and the same in a process that it spawned
MAIN = {"__main__", "__mp_main__"}
PLAIN = (type(None), bool, int, str)
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
    """The class that a module was built of. FSDP2 and DTensor's checkpointing derive another, with the class as its last base.

    One that was derived while the program runs, and has the name of its base, is a patch: the file's own class is what was meant.
    """
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = parametrize.type_before_parametrizations(module)
    while (found := named(kind)) is not kind or kind.__module__.startswith("torch.distributed"):
        if isinstance(found, type) and found is not kind and issubclass(kind, found):
            return found
        if len(kind.__bases__) < 2 or not issubclass(kind.__bases__[-1], torch.nn.Module):
            raise UserError(
                f"{kind.__module__}.{kind.__qualname__}: no file has this class by its name, so the model cannot be built again; "
                "move the class to the top of a file"
            )
        kind = kind.__bases__[-1]
    return kind


class Describing:
    def __init__(self, model: torch.nn.Module):
        compiled = next(
            (n for n, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)), None
        )
        if compiled is not None:
            raise UserError(
                f"{compiled or 'the model'} was made by torch.jit, which leaves no class that it could be built of again; record the module that it was made of"
            )
        self.modules = {id(module): clean(name) for name, module in model.named_modules()}
        # Without that of AutoTP's layers: what else it put into the model, such as its loss function, is left out as they are.
        own = [module for module in model.modules() if "_checkpoint_wrapped_module" not in module._modules]
        files = {class_of(module).__module__ for module in own} - {deepspeed_layers.FILE}
        self.kind = class_of(model)
        self.packages = PACKAGES | {package_of(file) for file in files}
        self.tensors: dict[int, str] = {}
        for names in (model.named_parameters, model.named_buffers):
            for name, tensor in names():
                self.tensors.setdefault(id(tensor), clean(name))
        self.objects: dict[int, int] = {}
        self.sizes = divided.sizes_of(model)
        self.inside: set[int] = set()  # functions that are described now
        self.read_of_script: set[str] = set()  # names, by functions without one
        self.kept: list[object] = []  # so that no id is given twice
        self.left_out: list[str] = []
        self.hooks: list[str] = []  # of torch.nn.utils, which compute a weight before each call
        self.attributes: dict[str, torch.Tensor] = {}

    def module(self, module: torch.nn.Module, name: str) -> TREE:
        wrapped = module._modules.get("_checkpoint_wrapped_module") or module._modules.get("_orig_mod")
        if wrapped is not None:
            return self.module(wrapped, name)
        kind = class_of(module)
        if isinstance(module, DistributedDataParallel):  # around a part of the model
            child = self.module(module.module, f"{name}.module")
            kept: TREE = {"attributes": {}, "parameters": {}, "buffers": {}, "children": {"module": child}}
            return {"class": name_of(Passed), **kept}
        values = {
            key: value
            for key, value in vars(module).items()
            if key not in OWN and not key.startswith(OF_WRAPPERS)
        }
        if _calls_others(vars(module).get("forward"), module):
            values["forward"] = vars(module)["forward"]
        if kind.__module__ == deepspeed_layers.FILE:
            kind, values = deepspeed_layers.before(module)
        if quantized.is_one(module._parameters.get("weight")):
            kind, values = quantized.before(module)
        values |= divided.wholes(module, self.sizes)
        attributes = self.values(values, name)
        for key in values.keys() - attributes.keys():
            # Without what others put there, such as a loss for shards of the vocabulary, a class does what it does by itself.
            read = {} if key.startswith("_") else _numbers_read(values[key], kind)
            attributes |= {key: {"left": read}} if read else {}
        hooks = {type(hook) for hook in module._forward_pre_hooks.values()}
        self.hooks += [
            f"{one.__name__} of {name or 'the model'}"
            for one in hooks
            if one.__module__.startswith("torch.nn.utils")
        ]
        if vars(module).get("_is_expert_parallel"):
            # Of transformers: the number is that of this rank's experts.
            whole: Any = next(iter(module._parameters.values()))
            attributes |= {"_is_expert_parallel": False, "num_experts": whole.shape[0]}
        tensors = {
            group: {
                key: None if tensor is None else self.parameter(tensor)
                for key, tensor in getattr(module, f"_{group}").items()
            }
            for group in ("parameters", "buffers")
        }
        children = {
            key: None if child is None else self.module(child, clean(f"{name}.{key}" if name else key))
            for key, child in module._modules.items()
        }
        return {"class": name_of(kind), "attributes": attributes, **tensors, "children": children}

    def parameter(self, tensor: torch.Tensor) -> TREE:
        """Of a parameter or buffer, as the whole model has it."""
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
        """By the path of the script that runs: what its modules and optimizers read of it, such as settings from the command line."""
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        main = globals_of(self.kind)
        own = {
            one.__name__
            for one in (self.kind, *main.values())
            if isinstance(one, type) and issubclass(one, kinds) and one.__module__ in MAIN
        }
        path = script_of(main)
        own |= self.read_of_script
        if not own or not path.is_file():
            return {}
        values: TREE = {}

        def has_value(name: str) -> bool:
            if name.startswith("__") or name not in main:
                return False
            value = main[name]
            if isinstance(value, (type, types.FunctionType, types.ModuleType)):
                return False
            if isinstance(value, argparse.Namespace):
                value = argparse.Namespace(**origin.without_secret_values(vars(value)))
            with contextlib.suppress(Unnamed):  # then it is computed as the script does
                values[name] = self.value(value, f"script.{name}")
            return name in values

        Script(path, path.read_bytes()).needed(own, has_value)
        return {str(path): {"package": main.get("__package__"), "values": values}}

    def values(self, values: dict[str, Any], where: str) -> TREE:
        """Values by name as JSON; what has no name is left out."""
        found: TREE = {}
        for key, value in values.items():
            try:
                found[key] = self.value(value, f"{where}.{key}".removeprefix("."))
            except Unnamed as error:
                self.left_out.append(f"{where}.{key}: {error}")
        return found

    def value(self, value: Any, where: str) -> Any:
        """A value as JSON. Raises Unnamed for what has no name."""
        if type(value) is int and value in self.tensors:
            return {"id": self.tensors[value]}
        if isinstance(value, PLAIN) and type(value) in PLAIN:
            return value
        if isinstance(value, float):
            value = float(value)  # also of numpy
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return self._all(value, where)
        for kind, make in SEQUENCES.items():
            if type(value) is make:
                return {kind: self._all(value, where)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            self._require_named(type(value))
            return {"namedtuple": name_of(type(value)), "values": self._all(value, where)}
        if type(value) in (dict, collections.OrderedDict):
            return {
                "dict": [self._all(pair, f"{where}.{number}") for number, pair in enumerate(value.items())]
            }
        if type(value) is collections.defaultdict:
            return {"defaultdict": [self.value(one, where) for one in (value.default_factory, dict(value))]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if process_group.is_group(value):
            return {"process group": None}
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, enum.Enum) or hasattr(type(value), "__members__"):  # also of C++
            self._require_named(type(value))
            return {"enum": name_of(type(value)), "name": value.name}
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
            return {"partial": [self.value(part, where) for part in parts]}
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            if getattr(class_of(value.__self__), value.__name__, None) is not value.__func__:
                raise Unnamed(f"the method {value.__name__}, which its class does not have")
            return {"method": [self._module(value.__self__), value.__name__]}
        if functions.is_nameless(value) and package_of(value.__module__ or "") in self.packages:
            return self._function(value, where)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            self._require_named(value)
            return {"named": name_of(value)}
        if typing.get_origin(value) is not None or type(value).__module__ == "typing":
            return self._annotation(value, where)
        return self._object(value, where)

    def _function(self, function: types.FunctionType, where: str) -> TREE:
        if id(function) in self.inside:
            raise Unnamed("a function that encloses itself")
        self.inside.add(id(function))
        try:
            about = functions.described(function, self.value, where)
        except ValueError as error:
            raise Unnamed(str(error)) from error
        finally:
            self.inside.remove(id(function))
        if function.__module__ in MAIN:
            self.read_of_script |= {*names_of(function.__code__)}
        return {"function": name_of(function).partition(":")[0], **about}

    def _annotation(self, value: Any, where: str) -> TREE:
        """Such as Union, or Union[Tensor, None]: a module may keep those of a method."""
        origin = typing.get_origin(value)
        if origin is None:
            name = str(value).removeprefix("typing.")
            if getattr(typing, name, None) is not value:
                raise Unnamed(f"{value}, which typing does not have")
            return {"named": f"typing:{name}"}
        made_of = typing.Union if origin is types.UnionType else origin
        inside = tuple(None if one is types.NoneType else one for one in typing.get_args(value))
        return {"annotation": [self.value(one, where) for one in (made_of, inside)]}

    def _all(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.value(one, f"{where}.{number}") for number, one in enumerate(values)]

    def _require_named(self, value: Any) -> None:
        """Only what `Building.named` of lockstep/recorder/building.py finds again."""
        if named(value) is not value or package_of(value.__module__) not in self.packages:
            raise Unnamed(
                f"{getattr(value, '__qualname__', value)} is of no package of the model's own classes, or has no name there"
            )

    def _module(self, module: torch.nn.Module) -> TREE:
        if id(module) not in self.modules:
            raise Unnamed("a module that is no part of the model")
        return {"module": self.modules[id(module)]}

    def _tensor(self, tensor: torch.Tensor, where: str) -> TREE:
        if id(tensor) in self.tensors:
            return {"tensor": self.tensors[id(tensor)]}
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain and not isinstance(tensor, DTensor):
            raise Unnamed(f"a {type(tensor).__name__} ({tensor.layout})")
        self.attributes[clean(where)] = tensor
        return {"attribute": clean(where)}

    def _object(self, value: object, where: str) -> TREE:
        """An object of a class with attributes, and perhaps items, such as a config. One that stands in several places stays one."""
        if id(value) in self.objects:
            return {"same": self.objects[id(value)]}
        kind = type(value)
        self._require_named(kind)
        # What C++ holds, as of a scripted function, is in no attribute.
        of_c = kind.__module__ == "builtins" or type(kind).__name__ == "pybind11_type"
        if of_c or not hasattr(value, "__dict__"):
            raise Unnamed(f"a {kind.__qualname__}")
        number = self.objects[id(value)] = len(self.objects)
        self.kept.append(value)
        about = {"object": name_of(kind), "number": number, "attributes": self.values(vars(value), where)}
        if isinstance(value, dict):
            kept = self.values({key: one for key, one in dict.items(value) if isinstance(key, str)}, where)
            about["items"] = [*kept.items()]
        elif isinstance(value, list):
            about["elements"] = self._all(list.__iter__(value), where)
        return about


def _numbers_read(value: object, kind: type) -> TREE:
    """Numbers and texts of an object that is left out, such as of a tokenizer, by those names that the code of a module's class has."""
    if isinstance(value, NO_OBJECTS):
        return {}
    found: TREE = {}
    functions_of = (
        one for base in kind.__mro__ for one in vars(base).values() if base is not torch.nn.Module
    )
    codes = [one.__code__ for one in functions_of if isinstance(one, types.FunctionType)]
    for name in {
        name for code in codes for one in (code, *functions.codes_in(code)) for name in one.co_names
    }:
        with contextlib.suppress(Exception):  # of a property
            one = getattr(value, name)
            found |= {name: one} if type(one) in (bool, int, float, str) else {}
    return found


def _calls_others(forward: Any, module: torch.nn.Module) -> bool:
    """Whether a module was given a function as its `forward` that knows other modules, such as an adapter's. Another one is a patch, like a hook."""
    if not isinstance(forward, types.FunctionType):
        return False
    known = [
        *functions.enclosed(forward).values(),
        *(forward.__defaults__ or ()),
        *(forward.__kwdefaults__ or {}).values(),
    ]
    return any(isinstance(one, torch.nn.Module) and one is not module for one in known)


class Passed(torch.nn.Module):
    """What DDP around a part of a model is built again as."""

    module: torch.nn.Module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)


class Unnamed(Exception):
    """A value that JSON cannot name."""


def package_of(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def name_of(value: Any) -> str:
    """Where a class or function is found: "module:NAME", or "/path/to/script.py:NAME" for one of the script that runs."""
    module = str(script_of(globals_of(value))) if value.__module__ in MAIN else value.__module__
    return f"{module}:{_path(value)}"


def _path(value: Any) -> str:
    """What is of C++ may have been given another name than the qualified one, such as torch.tanh."""
    of_c = isinstance(value, types.BuiltinFunctionType) or type(value).__name__ == "pybind11_type"
    return str(value.__name__ if of_c else value.__qualname__)


def script_of(names: TREE) -> Path:
    """Of a notebook, and of Python's -c, the path is no file's."""
    return Path(names.get("__file__") or "").absolute()


def globals_of(value: Any) -> TREE:
    """Of the script that a class or function is of: of the one that runs, or what came with it from another process, as with Ray's workers."""
    own = vars(sys.modules["__main__"])
    if value.__name__ in own:
        return own
    found = (getattr(one, "__globals__", {}) for one in (value, *getattr(value, "__dict__", {}).values()))
    return next((one for one in found if one.get("__name__") in MAIN), own)


def named(value: Any) -> Any:
    """What a file has under a class's or function's own name, or None."""
    names = globals_of(value)
    if value.__module__ in MAIN and not script_of(names).is_file():
        return None
    if names is not vars(sys.modules["__main__"]):
        return None if "<locals>" in value.__qualname__ else value
    try:
        return attribute_of(importlib.import_module(value.__module__), _path(value))
    except (AttributeError, ImportError, ValueError):
        return None


def attribute_of(module: types.ModuleType, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


def own_hooks(model: torch.nn.Module, left_out: list[str]) -> list[list[str]]:
    """[a module, how a hook of it is registered, another module, the method of that which it is], as of a model that keeps a hidden output.

    Without methods that use what is left out, such as a file.
    """
    names = {id(module): clean(name) for name, module in model.named_modules()}
    gone = {one.partition(":")[0] for one in left_out}
    return [
        [clean(name), register, names[id(hook.__self__)], hook.__name__]
        for name, module in model.named_modules()
        for register, hooks, with_keywords in (
            ("register_forward_pre_hook", module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            ("register_forward_hook", module._forward_hooks, module._forward_hooks_with_kwargs),
        )
        for number, hook in hooks.items()
        if isinstance(hook, types.MethodType) and id(hook.__self__) in names and number not in with_keywords
        if inspect.getattr_static(type(hook.__self__), hook.__name__, None) is hook.__func__
        if gone.isdisjoint(f"{names[id(hook.__self__)]}.{key}" for key in hook.__code__.co_names)
    ]


def describe(model: torch.nn.Module) -> tuple[TREE, dict[str, torch.Tensor]]:
    """(the tree, the tensors that belong to it: buffers, and attributes that are tensors).

    Raises UserError for a class that no file has by its name.
    """
    describing = Describing(model)
    tree = describing.module(model, "")
    scripts = describing.scripts()
    buffers = {f"buffer/{clean(name)}": buffer for name, buffer in model.named_buffers()}
    attributes = {f"attribute/{name}": tensor for name, tensor in describing.attributes.items()}
    more = {
        "left_out": describing.left_out,
        "hooks": describing.hooks,
        "paths": user_file.own_paths(),
        "scripts": scripts,
    }
    return {**tree, **more}, {**buffers, **attributes}
