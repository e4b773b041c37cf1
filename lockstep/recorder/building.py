"""Build a model again from the tree that lockstep/recorder/tree.py made of it."""

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
from lockstep.ground.errors import CannotComputeError
from lockstep.recorder import functions, local_classes, process_group, surroundings
from lockstep.recorder.allowed import HARMLESS, PACKAGES, is_allowed, package_of
from lockstep.recorder.names import attribute_of
from lockstep.recorder.script import Definitions, Script
from lockstep.recorder.tree import SEQUENCES, TREE, WEIGHT_HOOKS, nodes


# Cached, as a script may register what cannot be registered twice. The number of the process group is in the key:
# with a new group, the script is run again, as it would have the earlier one.
@functools.cache
def _definitions(path: str, source: bytes, about: str, _group_number: int) -> Definitions:
    return Definitions(Script(Path(path), source), **json.loads(about))


# Modules whose classes annotations such as list[int] are made of
GENERIC = {"builtins", "collections", "collections.abc"}


def _register_recordable_outputs(module: torch.nn.Module) -> None:
    """Register which outputs of its modules a transformers model may be asked for.

    The model's constructor does this outside of the model, and it is not called here.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None and hasattr(module, "_can_record_outputs"):
        capturing._CAN_RECORD_REGISTRY[module] = module._can_record_outputs


class Building:
    """Builds modules, parameters and values from JSON.

    `tensors` are the recorded tensors by name, such as buffer/NAME. `scripts` has, by path, what was recorded of scripts.
    Methods raise ValueError for what a recording may not name.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], scripts: TREE):
        self.tensors, self.scripts = tensors, scripts
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.objects: dict[int, object] = {}
        self.local_classes: dict[str, type] = {}
        self.packages = {*PACKAGES, *map(package_of, scripts)}

    def module(self, tree: TREE, name: str) -> torch.nn.Module:
        local = tree["local_class"]
        module_class = self.module_class(tree["class"], local)
        module = module_class.__new__(module_class)
        torch.nn.Module.__init__(module)
        self.modules[name] = module
        for key, recorded in tree["parameters"].items():
            module._parameters[key] = None if recorded is None else self.parameter(recorded)
        for key, recorded in tree["buffers"].items():
            module._buffers[key] = None if recorded is None else self.tensors[f"buffer/{recorded['is']}"]
        for key, child in tree["children"].items():
            child_name = f"{name}.{key}" if name else key
            module._modules[key] = None if child is None else self.module(child, child_name)
        return module

    def module_class(self, name: str, local: TREE | None = None) -> type[torch.nn.Module]:
        """Return a module's class, described by `local` if a function defines it. Values may then be of its package, too."""
        found = self.find(name) if local is None else self.local_class(name, local)
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            raise ValueError(f"{name} is no torch.nn.Module")
        # Functions of Lockstep are none of a model's.
        self.packages |= {package_of(name)} - {"lockstep"}
        return found

    def parameter(self, about: TREE) -> torch.nn.Parameter:
        name = about["is"]
        if name not in self.parameters:
            empty = torch.empty(
                about["shape"], dtype=getattr(torch, about["dtype"].removeprefix("torch.")), device="meta"
            )
            self.parameters[name] = torch.nn.Parameter(empty, requires_grad=about["requires_grad"])
        return self.parameters[name]

    def fill(self, tree: TREE, name: str) -> None:
        """Set the attributes of a module and of its children, once all modules are built."""
        module = self.modules[name]
        for key, recorded in tree["attributes"].items():
            value = self.value(recorded)
            if callable(value) and hasattr(torch.nn.Module, key) and key != "forward":
                raise ValueError(f"{key} would be called for a method of torch.nn.Module")
            module.__dict__[key] = value
        for recorded in tree["weight_hooks"]:
            hook = self.value(recorded)
            if not type(hook).__module__.startswith(WEIGHT_HOOKS):
                raise ValueError(f"{type(hook).__name__} computes no weight")
            module.register_forward_pre_hook(hook)
        _register_recordable_outputs(module)
        if "parametrizations" in tree["children"]:
            parametrize._inject_new_class(module)
            for key in tree["children"]["parametrizations"]["children"]:
                parametrize._inject_property(module, key)
        for key, child in tree["children"].items():
            if child is not None:
                self.fill(child, f"{name}.{key}" if name else key)

    def register(self, hooks: list[list[Any]]) -> None:
        """Register the hooks that lockstep/recorder/own_hooks.py lists."""
        for name, register, hook in hooks:
            if register not in ("register_forward_pre_hook", "register_forward_hook"):
                raise ValueError(f"{register} registers no hook")
            getattr(self.modules[name], register)(self.value(hook))

    def find(self, name: str) -> Any:
        """Return the class or function that has this name by `name_of` of lockstep/recorder/names.py."""
        module, _, path = name.partition(":")
        if not module.endswith(".py"):
            return attribute_of(importlib.import_module(module), path)
        return self.definitions(module).find(path, self.value)

    def definitions(self, script: str) -> Definitions:
        recorded = self.scripts.get(script, {"package": None, "values": {}})
        if not Path(script).is_file():
            raise ImportError(f"the script {script} is not there")
        user_file.require_to_run(Path(script))
        definitions = _definitions(
            script, Path(script).read_bytes(), json.dumps(recorded), process_group.number
        )
        # In sys.modules, those of another recording may be in their place.
        definitions.enlist()
        return definitions

    def local_class(self, name: str, about: TREE) -> type:
        """Return the class `name` that a function defines, described by lockstep/recorder/local_classes.py. There is one of a name."""
        if name not in self.local_classes:
            file = name.partition(":")[0]
            if file.endswith(".py"):
                definitions = self.definitions(file)
                read = local_classes.names_read(Path(file).read_bytes(), about["path"])
                definitions.define(read, self.value)
                names = vars(definitions.module)
            else:
                names = vars(importlib.import_module(file))
            if user_file.is_installed(Path(names["__file__"])):
                raise ValueError(f"{name} is of an installed package")
            self.local_classes[name] = local_classes.made(about, names, self.value)
        return self.local_classes[name]

    def named(self, name: str) -> Any:
        """Return a function or class of torch, or of a package that the model's own classes are of."""
        if package_of(name) not in self.packages:
            raise ValueError(f"{name} is of no package that the model's classes are of")
        parts = name.partition(":")[2].split(".")
        # Such as __globals__, which has all names of a function's file
        if any(part.startswith("__") for part in parts):
            raise ValueError(f"{name} is no class or function that a recording may name")
        value = self.find(name)
        if isinstance(value, torch.jit.ScriptFunction):
            # In a file that was imported before scripting was turned off
            value = value._torchdynamo_inline  # type: ignore[attr-defined]
        script = name.partition(":")[0]
        if script.endswith(".py"):
            # What the script imports, such as os.system, is defined in other files.
            if getattr(value, "__module__", None) != user_file.module_name(Path(script)):
                raise ValueError(f"{name} is not defined in that file")
            return value
        if not is_allowed(value, name, self.packages):
            raise ValueError(f"{name} is no class or function that a recording may name")
        return value

    def value(self, value: Any) -> Any:
        """Return the value that JSON of `Describing.value` of lockstep/recorder/tree.py stands for."""
        if isinstance(value, list):
            return [self.value(element) for element in value]
        if not isinstance(value, dict):
            return value
        [(kind, content), *_] = value.items()
        if kind in SEQUENCES:
            return SEQUENCES[kind]([self.value(element) for element in content])
        match kind:
            case "float":
                return float(content)
            case "dict":
                return {self.value(key): self.value(item) for key, item in content}
            case "deque":
                return collections.deque(map(self.value, content), value["maxlen"])
            case "defaultdict":
                factory, items = map(self.value, content)
                if factory is not None and factory not in HARMLESS:
                    raise ValueError(
                        "a defaultdict makes its values by another class than one of Python's own"
                    )
                return collections.defaultdict(factory, items)
            case "id":
                return id(self.parameters.get(content))
            case "dtype":
                return getattr(torch, content)
            case "device":
                return torch.device("cpu")
            case "tensor":
                return self.parameters.get(content, self.tensors.get(f"buffer/{content}"))
            case "process group":
                return process_group.group()
            case "attribute":
                return self.tensors[f"attribute/{content}"]
            case "array":
                return self.value(content).numpy()
            case "sparse":
                parts = [self.value(content[name]) for name in ("indices", "values")]
                return _sparse(*parts, shape=value["shape"], is_coalesced=value["is_coalesced"])
            case "module":
                return self.modules[content]
            case "hidden":
                return self.hidden(value)
            case "enum":
                members = getattr(self.named(content), "__members__", {})
                return members[value["name"]]
            case "namedtuple":
                return _named_tuple(self.named(content), map(self.value, value["values"]))
            case "annotation":
                generic, type_arguments = map(self.value, content)
                # The type is asked, as an object's own __module__ may be a false "typing".
                is_generic = isinstance(generic, type) and generic.__module__ in GENERIC
                if not (is_generic or type(generic).__module__ == "typing"):
                    raise ValueError(f"{generic} is no annotation")
                return operator.getitem(generic, type_arguments)
            case "partial":
                function, arguments, options = map(self.value, content)
                return functools.partial(function, *arguments, **options)
            case "method":
                # Only a function that the class of a module of the model defines: attributes of methods lead everywhere.
                module, name = self.modules[content[0]["module"]], content[1]
                method = inspect.getattr_static(type(module), name)
                if not isinstance(method, types.FunctionType):
                    raise ValueError(f"{name} is no method of {type(module).__name__}")
                return types.MethodType(method, module)
            case "named":
                return self.named(content)
            case "function":
                return self.function(value)
            case "local class":
                return self.local_class(content, value)
            case "left":
                return surroundings.Left({key: self.value(item) for key, item in content.items()})
            case "same":
                return self.objects[content]
            case "object":
                return self.object(value)
        raise ValueError(f"{kind} is no kind of value")

    def hidden(self, about: TREE) -> torch.nn.Module:
        """Return a frozen module that is no part of the model, such as a teacher in a list."""
        tensors = {name: self.tensors[f"attribute/{about['at']}.{name}"] for name in about["tensors"]}
        module = build(about["hidden"], tensors)
        give(module, {name: tensors[f"weight/{name}"] for name, _ in module.named_parameters()})
        for name, inner in module.named_modules():
            inner.training = name not in about["evaluated"]
        return module

    def function(self, about: TREE) -> types.FunctionType:
        """Return a function that no file has by a name, described by lockstep/recorder/functions.py."""
        name = about["function"]
        if package_of(name) not in self.packages - PACKAGES or "<" not in about["path"]:
            raise ValueError(f"{name} is of no package that the model's own classes are of")
        is_script = name.endswith(".py")
        names = (
            functions.Names(name, self.definitions(name), self.value)
            if is_script
            else vars(importlib.import_module(name))
        )
        return functions.made(about, names, self.value)

    def object(self, about: TREE) -> object:
        object_class = self.named(about["object"])
        instance = self.objects[about["number"]] = object_class.__new__(object_class)
        for key, attribute in about["attributes"].items():
            instance.__dict__[key] = self.value(attribute)
        if isinstance(instance, dict):
            dict.update(instance, [(str(key), self.value(item)) for key, item in about.get("items", [])])
        elif isinstance(instance, list):
            list.extend(instance, map(self.value, about.get("elements", [])))
        return instance


def _named_tuple(kind: Any, values: Iterable[Any]) -> tuple:
    """Return a named tuple of the class `kind`. The recording names the class, so nothing of it is called."""
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"{kind} is no named tuple")
    return tuple.__new__(kind, values)


def _sparse(
    indices: torch.Tensor, elements: torch.Tensor, *, shape: list[int], is_coalesced: bool
) -> torch.Tensor:
    """Return a sparse tensor. Raises ValueError if its indices are none of its shape, at which torch would read other memory."""
    try:
        return torch.sparse_coo_tensor(
            indices, elements, shape, is_coalesced=is_coalesced, check_invariants=True
        )
    except RuntimeError as error:
        raise ValueError(f"a sparse tensor of {shape}: {error}") from error


def _building(tree: TREE, tensors: dict[str, torch.Tensor]) -> Building:
    """Return what builds values that may be of the packages of the tree's classes."""
    building = Building(tensors, tree["scripts"])
    # The scripts that define the other classes may have values of these classes' packages.
    for name in dict.fromkeys(node["class"] for node in nodes(tree) if node["local_class"] is None):
        if not name.partition(":")[0].endswith(".py"):
            building.module_class(name)
    return building


def values_of(
    tree: TREE, model: torch.nn.Module, values: TREE, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return values that were described apart from a model, such as what it is called with. `tensors` has those that are in them."""
    building = _building(tree, {f"attribute/{name}": tensor for name, tensor in tensors.items()})
    building.modules, building.parameters = dict(model.named_modules()), dict(model.named_parameters())
    return {name: building.value(value) for name, value in values.items()}


def build(tree: TREE, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Build the model again. Its parameters are on the meta device, its buffers are those of `tensors`.

    Raises UserError for a class or an attribute that no longer exists.
    """
    for path in tree["paths"]:
        user_file.search(Path(path))
    if "surroundings" in tree:
        surroundings.set_environment(tree)
    # Scripting is turned off, as no mode sees what a scripted function casts. Torch's own formulas for forward-mode
    # derivatives are scripted when they are loaded, so they are loaded before.
    torch.autograd.forward_ad._maybe_load_decompositions()
    torch.jit._state.disable()
    try:
        building = _building(tree, tensors)
        model = building.module(tree, "")
        building.fill(tree, "")
        building.register(tree.get("own_hooks", []))
        if "surroundings" in tree:
            surroundings.give_back(tree["surroundings"], model, Building({}, {}).value)
    except (AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise CannotComputeError(
            f"the recorded model cannot be built again ({error}); judge it where its code can be imported, with the packages of the run"
        ) from error
    # A statement of its own: a class may have a `train` of its own, which must be called and may return None.
    model.train(True)
    return model


def set_state(model: torch.nn.Module, values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Set attributes of modules to values as `state_of` of lockstep/recorder/module_state.py returns them.

    The tensors that are in the values are copied.
    """
    modules = dict(model.named_modules())
    building = Building({f"attribute/{name}": tensor.clone() for name, tensor in tensors.items()}, {})
    for name, value in values.items():
        module, _, key = name.rpartition(":")
        if module in modules:
            _set_attribute(modules[module].__dict__, key, building.value(value))


def _set_attribute(names: dict[str, Any], key: str, value: Any) -> None:
    """Set one of the attributes `names` of a module. OBJECT.KEY is an attribute of the object, or else an item."""
    first, _, inner_key = key.partition(".")
    if not inner_key:
        names[key] = value
    elif first not in names:
        # The object could not be built again.
        return
    elif isinstance(names[first], dict) and inner_key not in getattr(names[first], "__dict__", {}):
        dict.__setitem__(names[first], inner_key, value)
    else:
        # Not by the object's own __setattr__, which may do more.
        vars(names[first])[inner_key] = value


def give(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the parameters of a model that was built these values, in place.

    So tied parameters stay tied, and lists that hold parameters still hold them.
    """
    for name, parameter in model.named_parameters():
        weight = torch.nn.Parameter(weights[name], requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, weight)
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module._init_flat_weights()
