"""Before any test here imports transformers: where SGLang is installed without a GPU, even that fails without this."""

from __future__ import annotations

from tests.engine import sglang_shim

sglang_shim.install_where_needed()
