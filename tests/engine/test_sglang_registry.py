"""Which of SGLang's models a process imports."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),  # sglang alone takes 10 to 25 s to import
]


def checkpoint(folder: Path, *names: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": list(names)}))
    return folder


def test_the_model_that_a_checkpoint_names_is_known_and_few_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omniflow.engine.sglang_registry import _registry, know_models_of

    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "gpt2")
    know_models_of(checkpoint(tmp_path, "Starcoder2ForCausalLM"))
    assert _registry().resolve_model_cls(["Starcoder2ForCausalLM"])[1] == "Starcoder2ForCausalLM"
    assert "sglang.srt.models.starcoder2" in sys.modules
    assert "sglang.srt.models.dbrx" not in sys.modules  # which nothing else needs
    assert os.environ["SGLANG_DISABLED_MODEL_ARCHS"] == "gpt2"


def test_a_name_that_no_file_has_lets_sglang_look_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omniflow.engine.sglang_registry import _registry, know_models_of

    asked: list[str] = []
    monkeypatch.setattr(type(_registry()), "register", lambda _, package, **__: asked.append(package))
    know_models_of(checkpoint(tmp_path, "LlamaForCausalLM"))
    know_models_of(checkpoint(tmp_path))
    assert not asked
    know_models_of(checkpoint(tmp_path, "NobodysForCausalLM"))
    assert asked == ["sglang.srt.models"]
