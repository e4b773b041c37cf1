"""What a user's file holds, named as path/to/file.py:NAME: a strategy, a model or an optimizer of their own."""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.ground.errors import UserError, first_line

STANDARD = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
LOCKSTEP = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}  # folders


def is_named(text: str) -> bool:
    """Whether a text names something in a user's file."""
    return ".py:" in text


def absolute(text: str) -> str:
    """The same name, from any folder."""
    path, _, name = text.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{name}"


def sha256(text: str, option: str) -> str:
    """The SHA-256 of the file that the text names. Raises UserError if it cannot be read."""
    path = Path(text.rpartition(":")[0])
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{option} {text}: the file cannot be read ({error.strerror or error})") from error


def load(text: str, option: str) -> Callable[..., Any]:
    """The function or class that is named, also as "module:NAME", with its file imported once. Raises UserError."""
    path, _, name = text.rpartition(":")
    try:
        module = import_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except Exception as error:  # noqa: BLE001 - a user's file may raise anything
        raise UserError(f"{option} {text}: the file cannot be imported ({first_line(error)})") from error
    member = getattr(module, name, None)
    if not callable(member):
        raise UserError(f"{option} {text}: the file has no function or class {name}")
    return member


def is_installed(path: Path) -> bool:
    """Whether a file or folder is of an installed package, or of Python itself."""
    return not INSTALLED.isdisjoint(path.parts) or not STANDARD.isdisjoint((path, *path.parents))


def place_of(error: BaseException) -> str:
    """Where code of the user's own raised an error, as ", at file.py:3"; "" if none of it did."""
    places = [
        f", at {path.name}:{call.lineno}"
        for call in traceback.extract_tb(error.__traceback__)
        if (path := Path(call.filename)).suffix == ".py"
        and not is_installed(path)
        and not path.is_relative_to(LOCKSTEP)
    ]
    return places[-1] if places else ""


def own_paths() -> list[str]:
    """The folders that Python looks for modules in, such as the script's, without those of installed packages."""
    folders = [Path(entry).absolute() for entry in sys.path]
    return [str(folder) for folder in folders if folder.is_dir() and not is_installed(folder)]


def search(folder: Path) -> None:
    """Let Python find modules in a folder, too, as it finds those beside a script."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


class OnlyOutside:
    """A finder for Python's import system that lets no module of a folder be imported."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            self.require(Path(spec.origin))
        return None

    def require(self, file: Path) -> None:
        """Raises ImportError for a file of the folder."""
        if file.resolve().is_relative_to(self.folder):
            raise ImportError(f"{file} lies in the recording, whose code is not run: move it elsewhere")


def run_nothing_of(folder: Path) -> None:
    """From now on run no code of a folder, such as of one that somebody else wrote."""
    if not any(isinstance(item, OnlyOutside) and item.folder == folder.resolve() for item in sys.meta_path):
        sys.meta_path.insert(0, OnlyOutside(folder))


def require_to_run(file: Path) -> None:
    """Raises ImportError for a file whose code is not to be run."""
    for finder in sys.meta_path:
        if isinstance(finder, OnlyOutside):
            finder.require(file)


def module_name(path: Path) -> str:
    """The name of the module that is made of a file, which is no module by its place."""
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def import_file(path: Path) -> ModuleType:
    """A user's file as a module, under a name that processes started later can import again."""
    name = module_name(path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader, "a name that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        search(path.absolute().parent)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
