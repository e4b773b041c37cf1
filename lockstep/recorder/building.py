"""A model that is built again of the tree that lockstep/recorder/tree.py made of it."""

import builtins
import collections
import functools
import importlib
import inspect
import json
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parametrize

from lockstep.ground import user_file
from lockstep.ground.errors import CannotComputeError, UserError
from lockstep.recorder import functions, process_group, surroundings
from lockstep.recorder.script import Definitions, Script
from lockstep.recorder.tree import PACKAGES, SEQUENCES, TREE, attribute_of, package_of


# A script may register what cannot be registered twice. It is run again where it would have an earlier process group.
@functools.cache
def _definitions(path: str, source: bytes, about: str, _of_group: int) -> Definitions:
    return Definitions(Script(Path(path), source), **json.loads(about))


# What a recording may name of Python's own: classes, and functions that run no text and open nothing
HARMLESS = {
    *(one for one in vars(builtins).values() if isinstance(one, type)),
    *(abs, all, any, divmod, len, max, min, pow, print, round, sorted, sum),
}


# Of torch and Python, whose functions a recording may name: no others, as some run texts or load files
FUNCTIONS = {
    "math",
    "torch.functional",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.utils.checkpoint",
    *("torch", *(f"torch._C._{of}" for of in ("nn", "linalg", "special", "fft", "sparse"))),
}

GENERIC = {"builtins", "collections", "collections.abc"}  # whose classes annotations are made of


def _module_of(function: Any) -> str:
    """The module that a function is of; "torch" only for what is built in there, such as torch.tanh."""
    module = getattr(function, "__module__", None) or ""
    return "" if module == "torch" and not isinstance(function, types.BuiltinFunctionType) else module


def _enlist(module: torch.nn.Module) -> None:
    """Do what the constructor of a model of transformers does beside the model: say which outputs of its modules it may be asked for."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None and hasattr(module, "_can_record_outputs"):
        capturing._CAN_RECORD_REGISTRY[module] = module._can_record_outputs


class Building:
    def __init__(self, tensors: dict[str, torch.Tensor], scripts: TREE):
        self.tensors, self.scripts = tensors, scripts
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.objects: dict[int, object] = {}
        self.packages = {*PACKAGES, *map(package_of, scripts)}

    def module(self, tree: TREE, name: str) -> torch.nn.Module:
        kind = self.find(tree["class"])
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            raise ValueError(f"{tree['class']} is no torch.nn.Module")
        # Whose functions are none of a model's
        self.packages |= {package_of(tree["class"])} - {"lockstep"}
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        self.modules[name] = module
        for key, about in tree["parameters"].items():
            module._parameters[key] = None if about is None else self.parameter(about)
        for key, about in tree["buffers"].items():
            module._buffers[key] = None if about is None else self.tensors[f"buffer/{about['is']}"]
        for key, child in tree["children"].items():
            inner_name = f"{name}.{key}" if name else key
            module._modules[key] = None if child is None else self.module(child, inner_name)
        return module

    def parameter(self, about: TREE) -> torch.nn.Parameter:
        name = about["is"]
        if name not in self.parameters:
            empty = torch.empty(
                about["shape"], dtype=getattr(torch, about["dtype"].removeprefix("torch.")), device="meta"
            )
            self.parameters[name] = torch.nn.Parameter(empty, requires_grad=about["requires_grad"])
        return self.parameters[name]

    def fill(self, tree: TREE, name: str) -> None:
        """Attributes, once all modules are there."""
        module = self.modules[name]
        for key, value in tree["attributes"].items():
            made = self.value(value)
            if callable(made) and hasattr(torch.nn.Module, key) and key != "forward":
                raise ValueError(f"{key} would be called for a method of torch.nn.Module")
            module.__dict__[key] = made
        _enlist(module)
        if "parametrizations" in tree["children"]:
            parametrize._inject_new_class(module)
            for key in tree["children"]["parametrizations"]["children"]:
                parametrize._inject_property(module, key)
        for key, child in tree["children"].items():
            if child is not None:
                self.fill(child, f"{name}.{key}" if name else key)

    def register(self, hooks: list[list[str]]) -> None:
        """Methods of modules as hooks of others: lockstep/recorder/tree.py names them."""
        for name, register, owner, method in hooks:
            if register not in ("register_forward_pre_hook", "register_forward_hook"):
                raise ValueError(f"{register} registers no hook")
            getattr(self.modules[name], register)(self.value({"method": [{"module": owner}, method]}))

    def find(self, name: str) -> Any:
        """What `name_of` names."""
        module, _, path = name.partition(":")
        if not module.endswith(".py"):
            return attribute_of(importlib.import_module(module), path)
        return self.definitions(module).find(path, self.value)

    def definitions(self, script: str) -> Definitions:
        about = self.scripts.get(script, {"package": None, "values": {}})
        if not Path(script).is_file():
            raise ImportError(f"the script {script} is not there")
        user_file.require_to_run(Path(script))
        found = _definitions(script, Path(script).read_bytes(), json.dumps(about), process_group.number)
        found.enlist()  # those of another recording may be in its place
        return found

    def named(self, name: str) -> Any:
        """A function or class of torch, or of a package that the model's own classes are of."""
        if package_of(name) not in self.packages:
            raise ValueError(f"{name} is of no package that the model's classes are of")
        parts = name.partition(":")[2].split(".")
        if any(one.startswith("__") for one in parts):  # such as all names of a function's file
            raise ValueError(f"{name} is no class or function that a recording may name")
        found = self.find(name)
        script = name.partition(":")[0]
        if script.endswith(".py"):
            # What it imports is of other files, such as os.system.
            if getattr(found, "__module__", None) != user_file.module_name(Path(script)):
                raise ValueError(f"{name} is not defined in that file")
            return found
        # A package's module has others among its names, such as os; and Python's own functions run texts.
        package = package_of(getattr(found, "__module__", None) or name)
        is_own = any(found is one for one in vars(builtins).values())
        is_function = package in PACKAGES and not isinstance(found, type) and callable(found)
        is_function &= type(found).__module__ != "typing"  # such as Union
        known = not is_function or found in HARMLESS or _module_of(found) in FUNCTIONS
        if package not in self.packages or not known or (is_own and found not in HARMLESS):
            raise ValueError(f"{name} is no class or function that a recording may name")
        return found

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if not isinstance(value, dict):
            return value
        [(kind, inside), *_] = value.items()
        if kind in SEQUENCES:
            return SEQUENCES[kind]([self.value(one) for one in inside])
        match kind:
            case "float":
                return float(inside)
            case "dict":
                return {self.value(key): self.value(one) for key, one in inside}
            case "defaultdict":
                factory, content = map(self.value, inside)
                if factory is not None and factory not in HARMLESS:
                    raise ValueError(
                        "a defaultdict makes its values by another class than one of Python's own"
                    )
                return collections.defaultdict(factory, content)
            case "id":
                return id(self.parameters.get(inside))
            case "dtype":
                return getattr(torch, inside)
            case "device":
                return torch.device("cpu")
            case "tensor":
                return self.parameters.get(inside, self.tensors.get(f"buffer/{inside}"))
            case "process group":
                return process_group.group()
            case "attribute":
                return self.tensors[f"attribute/{inside}"]
            case "module":
                return self.modules[inside]
            case "enum":
                members = getattr(self.named(inside), "__members__", {})
                return members[value["name"]]
            case "namedtuple":
                return _tuple(self.named(inside), map(self.value, value["values"]))
            case "annotation":
                made_of, given = map(self.value, inside)
                # An object may say of itself that it is of typing.
                own = isinstance(made_of, type) and made_of.__module__ in GENERIC
                if not (own or type(made_of).__module__ == "typing"):
                    raise ValueError(f"{made_of} is no annotation")
                return operator.getitem(made_of, given)
            case "partial":
                function, arguments, options = map(self.value, inside)
                return functools.partial(function, *arguments, **options)
            case "method":
                # Of the model's modules, and what their classes define: a method's own attributes lead everywhere.
                module, name = self.modules[inside[0]["module"]], inside[1]
                method = inspect.getattr_static(type(module), name)
                if not isinstance(method, types.FunctionType):
                    raise ValueError(f"{name} is no method of {type(module).__name__}")
                return types.MethodType(method, module)
            case "named":
                return self.named(inside)
            case "function":
                return self.function(value)
            case "left":
                return surroundings.Left({key: self.value(one) for key, one in inside.items()})
            case "same":
                return self.objects[inside]
            case "object":
                return self.object(value)
        raise ValueError(f"{kind} is no kind of value")

    def function(self, about: TREE) -> types.FunctionType:
        name = about["function"]
        if package_of(name) not in self.packages - PACKAGES or "<" not in about["path"]:
            raise ValueError(f"{name} is of no package that the model's own classes are of")
        if not name.endswith(".py"):
            names = vars(importlib.import_module(name))
            return functions.made(about, Path(names["__file__"]).read_bytes(), names, self.value)
        names = functions.Names(name, self.definitions(name), self.value)
        return functions.made(about, Path(name).read_bytes(), names, self.value)

    def object(self, about: TREE) -> object:
        kind = self.named(about["object"])
        made = self.objects[about["number"]] = kind.__new__(kind)
        for key, value in about["attributes"].items():
            made.__dict__[key] = self.value(value)
        if isinstance(made, dict):
            dict.update(made, [(str(key), self.value(one)) for key, one in about.get("items", [])])
        elif isinstance(made, list):
            list.extend(made, map(self.value, about.get("elements", [])))
        return made


def _tuple(kind: Any, values: Iterable[Any]) -> tuple:
    """A recording chooses the class, so that nothing else is called."""
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"{kind} is no named tuple")
    return tuple.__new__(kind, values)


def build(tree: TREE, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The model again: its parameters are on the meta device, its buffers are those of `tensors`.

    Raises UserError for a class or an attribute that is not there any more.
    """
    if tree["hooks"]:
        raise UserError(
            f"the weight that the hook {tree['hooks'][0]} computes before each call cannot be computed again; use torch.nn.utils.parametrizations"
        )
    building = Building(tensors, tree["scripts"])
    for path in tree["paths"]:
        user_file.search(Path(path))
    if "surroundings" in tree:
        surroundings.set_environment(tree)
    # No mode sees what a scripted function casts; but torch's own formulas for forward-mode derivatives are scripted when they are loaded.
    torch.autograd.forward_ad._maybe_load_decompositions()
    torch.jit._state.disable()
    try:
        model = building.module(tree, "")
        building.fill(tree, "")
        building.register(tree.get("own_hooks", []))
        if "surroundings" in tree:
            surroundings.give_back(tree["surroundings"], model, Building({}, {}).value)
    except (AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise CannotComputeError(
            f"the recorded model cannot be built again ({error}); judge it where its code can be imported, with the packages of the run"
        ) from error
    # A class may have a method of its own, which must be told and returns nothing
    model.train(True)
    return model


def set_state(model: torch.nn.Module, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Values as in `state_of`, of copies of the tensors that are in them."""
    modules = dict(model.named_modules())
    building = Building({f"attribute/{name}": one.clone() for name, one in tensors.items()}, {})
    for name, value in values.items():
        module, _, key = name.rpartition(":")
        if module in modules:
            _set(modules[module].__dict__, key, building.value(value))


def _set(names: dict[str, Any], key: str, value: Any) -> None:
    """An attribute; OBJECT.KEY is an attribute, or else an item, of an object that is one."""
    first, _, inside = key.partition(".")
    if not inside:
        names[key] = value
    elif first not in names:  # which could not be built again
        return
    elif inside in getattr(names[first], "__dict__", {}):
        names[first].__dict__[inside] = value
    else:
        dict.__setitem__(names[first], inside, value)


def give(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Let the parameters of a model that was built be these tensors, in place: tied ones stay tied, and lists that hold them do, too."""
    for name, parameter in model.named_parameters():
        whole = torch.nn.Parameter(weights[name], requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, whole)
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module._init_flat_weights()
