"""From what a user types to a Graph.

    ming_omni                    a graph that ships with omniflow: the module `graphs.ming_omni`
    path/to/my_graph.py          a file; the graph is its attribute `graph`
    path/to/my_graph.py:build    another attribute: a Graph, or a function without arguments that returns one

A file is imported under a real name (its stem, or its dotted name where it lies in a package), and the folder that
makes the name importable goes onto `sys.path` and into PYTHONPATH: host processes find its actors by that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from omniflow.errors import GraphError, OmniflowError, WeightsError
from omniflow.graph import Graph
from omniflow.topology import Profile, nearest
from omniflow.weights import read_file

T = TypeVar("T")

DEFAULT_ATTRIBUTE = "graph"
SHIPPED = "graphs"
"""The package that holds the graphs that ship with omniflow."""


def load_graph(reference: str) -> Graph:
    """The graph that `reference` names. Raises GraphError that says in one line what is wrong, and where."""
    place, colon, attribute = reference.partition(":")
    if colon and not attribute:
        raise GraphError(f"{reference!r} ends in a colon; write {place}:NAME, or {place} for its {DEFAULT_ATTRIBUTE!r}")
    module = _load_file(place) if _is_path(place) else _load_shipped(place)
    return _graph_in(module, place, attribute or DEFAULT_ATTRIBUTE)


def from_anywhere(reference: str) -> str:
    """`reference` as it means the same in any folder: a path is made absolute."""
    place, colon, attribute = reference.partition(":")
    return f"{Path(place).expanduser().absolute()}{colon}{attribute}" if _is_path(place) else reference


def model_from_anywhere(model: str) -> str:
    """The checkpoint `model` as it means the same in any folder: a path is made absolute.

    Raises GraphError for an empty one, which as a path would be the current folder.
    """
    if not model.strip():
        raise GraphError("the name of the checkpoint is empty; give a folder (. is this one), or hf:owner/repo")
    is_path = _is_checkpoint(model) and not model.startswith("hf:")
    return str(Path(model).expanduser().absolute()) if is_path else model


def _is_checkpoint(model: str) -> bool:
    """False for what can only be the name of packaged weights."""
    return model.startswith(("hf:", ".", "/", "~")) or Path(model).exists()


def profile_of(graph: Graph, model: str) -> tuple[Profile, str]:
    """The profile of `graph` that serves the checkpoint `model`, and why, in words.

    That which names `model` as its own, else the first that takes its config.json. Raises GraphError or WeightsError.
    """
    for profile in graph.profiles.values():
        if profile.checkpoint is not None and profile.checkpoint.model == model:
            return profile, f"{model} is its checkpoint"
    own = [profile.checkpoint.model for profile in graph.profiles.values() if profile.checkpoint]
    if not _is_checkpoint(model):
        raise GraphError(f"{model!r} is no folder; a checkpoint is that, or hf:owner/repo{nearest(model, own)}")
    try:
        config = msgspec.json.decode(read_file(model, "config.json"), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise WeightsError(f"config.json of {model} is broken: {error}") from error
    profile = graph.profile_for(model, config)
    return profile, f"{model} is such a checkpoint: {profile.checkpoint}"


def shipped_graphs() -> list[str]:
    """Names of the graphs that ship with omniflow."""
    package = importlib.import_module(SHIPPED)
    return sorted(found.name for found in pkgutil.iter_modules(package.__path__) if not found.name.startswith("_"))


def _is_path(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or place.startswith((".", "~"))


def _load_shipped(name: str) -> ModuleType:
    known = shipped_graphs()
    if name not in known:
        file = f"{name}.py"
        hint = f"; did you mean the file ./{file}?" if Path(file).is_file() else nearest(name, known)
        raise GraphError(f"no graph is called {name!r}{hint} (a file of your own ends in .py)")
    module = f"{SHIPPED}.{name}"
    spec = importlib.util.find_spec(module)
    file = spec.origin if spec and spec.origin else name
    try:
        return _reporting(file, Path(file), lambda: importlib.import_module(module))
    except GraphError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or missing.partition(".")[0] in ("omniflow", "actors", SHIPPED):
            raise
        raise GraphError(f"{error.message}; its models need `pip install 'omniflow[embedded]'`") from error


def _load_file(place: str) -> ModuleType:
    file = Path(place).expanduser().absolute()
    if file.is_dir():
        inside = sorted(found.name for found in file.glob("*.py") if not found.name.startswith("_"))
        raise GraphError(f"{place} is a folder; give a file{': ' + ', '.join(inside[:8]) if inside else ' of Python'}")
    if not file.is_file():
        others = [found.name for found in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise GraphError(f"there is no file {place}{nearest(file.name, others) if others else ''}")
    if file.suffix != ".py":
        raise GraphError(f"{place} is no Python file; its name has to end in .py")
    folder, name = _importable_name(file)
    _refuse_taken(place, name, file)
    _add_to_path(folder)
    module = _reporting(place, file, lambda: importlib.import_module(name))
    if module.__file__ is None or not file.samefile(module.__file__):
        raise GraphError(f"{place}: Python finds {module.__file__} under the name {name!r}; rename the file")
    return module


def _importable_name(file: Path) -> tuple[Path, str]:
    """The folder for `sys.path`, and the name that `file` has from there: dotted where it lies in packages."""
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if any("." in part for part in parts):
        raise GraphError(f"{file.name} cannot be imported: a dot stands inside its name; rename it")
    return folder, ".".join(parts)


def _refuse_taken(place: str, name: str, file: Path) -> None:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise GraphError(f"{place}: {top!r} is the name of a module of Python itself; rename it")
    for taken in {top, name} & sys.modules.keys():
        found = vars(sys.modules[taken]).get("__file__")
        expected = file if taken == name else file.parents[name.count(".") - 1] / "__init__.py"
        if found is None or not expected.samefile(found):
            raise GraphError(f"{place}: the name {taken!r} is taken by {found or 'another module'}; rename it")


def _add_to_path(folder: Path) -> None:
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)
    # Python 3.11 does not hand sys.path to the fork server. With its actors' modules loaded there, a host starts in
    # 20 ms; without them, each start imports them again, which is seconds where one of them needs torch.
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if text not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([text, *inherited])


def _graph_in(module: ModuleType, place: str, attribute: str) -> Graph:
    values = vars(module)
    if attribute not in values:
        names = sorted(name for name, value in values.items() if isinstance(value, Graph))
        if not names:
            raise GraphError(
                f"{place} has no {attribute!r}, and no Graph at all; assign one: graph = Graph('my_graph')"
            )
        raise GraphError(
            f"{place} has no {attribute!r}; its graphs are: {', '.join(f'{place}:{name}' for name in names)}"
        )
    value = values[attribute]
    if callable(value) and not isinstance(value, Graph):
        value = _called(value, f"{place}:{attribute}", Path(module.__file__ or place))
    if not isinstance(value, Graph):
        raise GraphError(f"{place}:{attribute} is no Graph but of type {type(value).__name__}")
    return value


def _called(function: Callable[..., object], where: str, file: Path) -> object:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise GraphError(f"{where} needs arguments; a function that makes a graph takes none") from None
    return _reporting(where, file, function)


def _reporting(place: str, file: Path, call: Callable[[], T]) -> T:
    """Run code of a graph file. Whatever it raises becomes one line that says where."""
    try:
        return call()
    except OmniflowError as error:
        raise GraphError(f"{_where(error, place, file)}: {error}") from error
    except SyntaxError as error:
        name = place if error.filename == str(file) else error.filename
        line = f":{error.lineno}" if error.lineno else ""
        raise GraphError(f"{name}{line}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # the boundary to a user's file, which may raise anything
        text = traceback.format_exception_only(error)[0].splitlines()[0]
        raise GraphError(f"{_where(error, place, file)}: {text}") from error


def _where(error: BaseException, place: str, file: Path) -> str:
    """The last line of the graph's own file that ran, else of what it imported."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename == str(file)]
    if own:
        return f"{place.partition(':')[0]}:{own[-1].lineno}"
    inner = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f"{inner[-1].filename}:{inner[-1].lineno}" if inner else place
