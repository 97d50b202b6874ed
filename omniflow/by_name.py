"""What new processes are given, with the classes and functions of the script that runs here by their names.

`multiprocess` would copy those (with dill). A copy is another type than the one that the new process has, as it imports
the script too, and msgspec's Structs cannot be copied at all.
"""

from __future__ import annotations

import io
import operator
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import msgspec
from multiprocess.reduction import ForkingPickler

from omniflow.errors import StartError


class ByName:
    """Stands for `value` among the arguments of a process, which gets that itself.

    Raises StartError where a Struct type that it has to do with cannot be found by its name there.
    """

    def __init__(self, value: object) -> None:
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        pickler.reducer_override = _name_of
        pickler.dump(value)
        self._told = buffer.getvalue()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return ForkingPickler.loads, (self._told,)


def _name_of(value: Any) -> Any:
    """The name of a class or function of the script; NotImplemented for what travels as `multiprocess` sees fit."""
    if not isinstance(value, (type, FunctionType)):
        return NotImplemented
    is_found = _is_found(value)
    if is_found and value.__module__ == "__main__":
        return value.__qualname__
    if not is_found and isinstance(value, type(msgspec.Struct)):
        raise StartError(
            f"the type {value.__name__!r} cannot be found by the processes of hosts: define it at the top of a script, "
            "or of a module that it imports (not in a function, nor at a prompt)"
        )
    return NotImplemented


def _is_found(value: Any) -> bool:
    """Whether a new process finds a class or function by its name."""
    try:
        found = operator.attrgetter(value.__qualname__)(sys.modules[value.__module__])
    except (AttributeError, KeyError):
        return False
    return found is value and (value.__module__ != "__main__" or _is_main_imported())


def _is_main_imported() -> bool:
    """Whether new processes import what runs here: not a prompt or a notebook, nor the `__main__` of a package."""
    main = vars(sys.modules["__main__"])
    spec = main.get("__spec__")
    if spec is not None:
        return not f".{spec.name}".endswith(".__main__")
    return "__file__" in main
