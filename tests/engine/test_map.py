"""The docstring of `omniflow.engine` is a map of its modules."""

from __future__ import annotations

import pkgutil
import re

from omniflow import engine


def test_the_map_names_every_module_once() -> None:
    table = (engine.__doc__ or "").split("\n\n")[1]
    rooms = [line[28:].replace("for GPUs", "") for line in table.splitlines()]
    named = [name for room in rooms for name in re.findall(r"\w+", room)]
    assert sorted(named) == sorted(module.name for module in pkgutil.iter_modules(engine.__path__))
