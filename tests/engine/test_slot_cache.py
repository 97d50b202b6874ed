"""What can be known of a GPU's kernels without one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from omniflow.engine import slot_cache

ENGINE = Path(slot_cache.__file__).parent


@pytest.mark.parametrize(
    ("head_dim", "dtype", "fits"),
    [
        (64, torch.float32, True),
        (128, torch.float32, True),
        (256, torch.bfloat16, True),
        (256, torch.float32, False),  # more shared memory than a block of an H200 has
        (72, torch.bfloat16, False),
    ],
)
def test_a_kernel_is_for_heads_that_fit_into_shared_memory(head_dim: int, dtype: torch.dtype, fits: bool) -> None:
    assert slot_cache._fits(head_dim, dtype) == fits


@pytest.mark.parametrize("file", sorted(ENGINE.glob("*kernels.py")), ids=lambda file: file.name)
def test_kernels_name_no_types_that_triton_does_not_know(file: Path) -> None:
    """It reads annotations itself, when a kernel is first called, on a GPU: of `Any` it says that it knows no such."""
    functions = [each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.FunctionDef)]
    kernels = [each for each in functions if any("triton.jit" in ast.unparse(by) for by in each.decorator_list)]
    assert kernels
    for kernel in kernels:
        named = {each.arg: ast.unparse(each.annotation) for each in kernel.args.args if each.annotation is not None}
        assert set(named.values()) <= {"tl.tensor", "tl.constexpr"}, kernel.name
        assert {name for name, kind in named.items() if kind == "tl.constexpr"} == set(filter(str.isupper, named))
