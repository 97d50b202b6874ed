"""Seeds of talkers: the same seed of a request gives the same sound, and no two of its parts are said alike."""

from __future__ import annotations

import secrets

import numpy as np

from omniflow.media import Options


def request_seed(options: Options) -> int:
    """That of a request, 64 bits: any integer that it gives, else one that nobody can know before."""
    return secrets.randbits(64) if options.seed is None else options.seed % 2**64


def part_seed(seed: int, number: int) -> int:
    """That of part `number` of a request with `seed`, 64 bits."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
