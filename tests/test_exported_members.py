"""The public API cannot grow, shrink or break by accident."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import omniflow
from omniflow import errors, media

ROOT = Path(__file__).parents[1]


def test_names_are_sorted_and_unique() -> None:
    assert omniflow.__all__ == sorted(set(omniflow.__all__))


@pytest.mark.parametrize("name", omniflow.__all__)
def test_every_name_can_be_imported(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from omniflow import {name}", namespace)
    assert namespace[name] is not None


def test_what_type_checkers_see_is_what_runs() -> None:
    """The imports under TYPE_CHECKING and the lazy table name the same things from the same modules."""
    tree = ast.parse(Path(omniflow.__file__).read_text())
    (typing_only,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in typing_only.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == omniflow._HOME
    assert set(seen) | {"__version__"} == set(omniflow.__all__)


@pytest.mark.parametrize("module", [errors, media])
def test_all_errors_and_media_values_are_exported(module: object) -> None:
    own = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert own - {"ErrorInfo"} <= set(omniflow.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Grpah'"):
        omniflow.Grpah  # noqa: B018


def test_dir_shows_the_public_names() -> None:
    assert set(omniflow.__all__) <= set(dir(omniflow))


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert omniflow.__version__ == project["version"]
