"""Weights: where the files of a model come from, and where they lie on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Weights(Protocol):
    """Files that an actor needs before `setup`."""

    name: str

    def path(self) -> Path:
        """The folder of the files. Raises WeightsError where they are not on this machine."""
        ...
