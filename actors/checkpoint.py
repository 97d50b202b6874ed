"""What lies in a checkpoint's folder in Hugging Face's layout, beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from omniflow.errors import WeightsError


def read_json(file: Path) -> dict[str, Any]:
    """What stands in `file`, nothing where it is not there. Raises WeightsError where it is broken."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise WeightsError(f"{file} is broken: {error}") from error


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of the config.json of a model that has others, too."""
    part: dict[str, Any] = config.get("text_config", config.get("llm_config", config))
    return part
