"""Which models SGLang knows in this process: ours, and of its own 200 the one that a checkpoint names.

It would import all of them, 600 modules, which is 2 of 11 s that a start's imports take on a CPU, and log a warning for
each that lacks a package.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

_PACKAGE = "sglang.srt.models"
_NOT_THESE = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's: names of modules of `_PACKAGE` that it does not import, with commas between."""


def register(package: str) -> None:
    """Let SGLang find the models in `package` by their names; of equal names the newest counts."""
    _registry().register(package, overwrite=True)


def know_models_of(folder: Path) -> None:
    """Let SGLang find the model of the checkpoint in `folder`; all of its own where none has that name."""
    config = folder / "config.json"
    names = json.loads(config.read_bytes()).get("architectures") or [] if config.is_file() else []
    registry = _registry()
    unknown = [name for name in names if name not in registry.models]
    found = {name: module for name in unknown for module in _modules() if _has(module, name)}
    for name, module in found.items():
        registry.models[name] = vars(importlib.import_module(f"{_PACKAGE}.{module.stem}"))[name]
    if len(found) < len(unknown):
        registry.register(_PACKAGE, overwrite=True)


def _registry() -> Any:
    """SGLang's, which begins without any models."""
    before = os.environ.get(_NOT_THESE)
    os.environ[_NOT_THESE] = ",".join(module.stem for module in _modules())
    try:
        return importlib.import_module(f"{_PACKAGE}.registry").ModelRegistry
    finally:
        if before is None:
            del os.environ[_NOT_THESE]
        else:
            os.environ[_NOT_THESE] = before


def _modules() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return [module for folder in folders or () for module in sorted(Path(folder).glob("*.py"))]


def _has(module: Path, name: str) -> bool:
    return re.search(rf"^class {re.escape(name)}\b", module.read_text(encoding="utf-8"), re.MULTILINE) is not None
