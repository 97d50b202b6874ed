"""Before any test here imports transformers: where SGLang is installed without a GPU, even that fails without this."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.ming.speaking import MingTalker
from tests.engine import sglang_shim

sglang_shim.install_where_needed()


@pytest.fixture(scope="module")
async def talker(anyio_backend: str, folder: Path) -> AsyncIterator[MingTalker]:
    """The talker of the checkpoint in a module's own `folder`."""
    actor = MingTalker(model=str(folder))
    await actor.setup()
    yield actor
    await actor.close()
