"""What lies in a checkpoint's folder in Hugging Face's layout: its JSON files, and its weights."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from omniflow.errors import WeightsError

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound="nn.Module")


def read_json(file: Path) -> dict[str, Any]:
    """What stands in `file`, nothing where it is not there. Raises WeightsError where it is broken."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise WeightsError(f"{file} is broken: {error}") from error


def read_config(file: Path, type: type[T], lacking: str) -> T:
    """What `type` names of `file`. Raises WeightsError that says what is `lacking` where it has it not."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=type)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{file.parent}: {file.name} {lacking}: {error}") from error


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of the config.json of a model that has others, too."""
    part: dict[str, Any] = config.get("text_config", config.get("llm_config", config))
    return part


def read_tensors(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """The tensors of the safetensors files in `folder` whose names begin with one of `prefixes`, as they are stored.

    Raises WeightsError where a file is broken, or one is missing that an index of the others names.
    """
    # Imports torch, so not at the top: a graph is checked and explained without it.
    from safetensors import SafetensorError

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsError(f"{folder} has no *.safetensors")
    missing = sorted(_indexed(folder / "model.safetensors.index.json") - {path.name for path in paths})
    if missing:
        others = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise WeightsError(f"{folder} lacks {missing[0]}{others}, which its index names; fetch the checkpoint again")
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            found |= _read_file(path, prefixes)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} is broken, or not whole ({error}); fetch it again") from error
    return found


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(path: Path) -> set[str]:
    """The files that the index at `path` names; none where there is no index."""
    try:
        return set(msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values())
    except FileNotFoundError:
        return set()
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{path} is no index of weights: {error}") from error


def _read_file(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefixes)}


def load(module: nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy `weights` into `module`, every one of both. Raises WeightsError that names what is missing or too many."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise _misfit(what, error) from error


def built(build: Callable[[], ModuleT], weights: Mapping[str, torch.Tensor], what: str) -> ModuleT:
    """The module that `build` makes, with `weights`, every one of both, as they are stored; for inference.

    Raises WeightsError that names what is missing or too many.
    """
    import torch

    with torch.device("meta"):  # a random start of 0.6 billion weights takes 10 s
        module = build()
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise _misfit(what, error) from error
    return module.requires_grad_(False).eval()


def _misfit(what: str, error: RuntimeError) -> WeightsError:
    """Of what torch says of weights that do not fit, the begin: a large model has thousands of names."""
    return WeightsError(f"the weights of {what} do not fit: {textwrap.shorten(str(error), 600, placeholder=' ...')}")
