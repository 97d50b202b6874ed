"""What SGLang is told, without SGLang."""

from __future__ import annotations

from omniflow.engine.sglang_settings import PROMPT_GRAPHS, server_settings


def test_prompts_are_cuda_graphs_up_to_what_the_cache_holds() -> None:
    whole = server_settings("gpu", 8, 4096, False, prompt_graphs=True)
    assert not whole["disable_prefill_cuda_graph"]
    assert whole["cuda_graph_bs_prefill"] == list(PROMPT_GRAPHS)
    assert server_settings("gpu", 8, 200, False, prompt_graphs=True)["cuda_graph_bs_prefill"][-1] == 192
    assert server_settings("gpu", 8, 4096, False, prompt_graphs=False)["disable_prefill_cuda_graph"]


def test_a_cpu_has_no_graphs() -> None:
    settings = server_settings("cpu", 8, 4096, False, prompt_graphs=True)
    assert settings["disable_cuda_graph"]
    assert "cuda_graph_bs_prefill" not in settings
