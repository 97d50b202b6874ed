"""The SGLang engine against the reference engine, on a tiny random Llama: on a GPU, or on a CPU through the shim.

SGLang is no requirement of the tests: they skip where it cannot be imported.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.engine.ranks import Ranks
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import ContextLengthError, InvalidInputError, OverloadedError, ProtocolError, UnsupportedError
from tests.engine.odd_values import ODD, assert_refused_or_answered
from tests.engine.tiny import CONTEXT, HIDDEN, VOCAB, drain, ids_of, prompt, request, run, tiny_llama

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

GPU = torch.cuda.is_available()
MARGIN = 0.05 if GPU else 0.0
"""Where two tokens are as near as this (logprob), other arithmetic may choose the other."""

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),  # sglang alone takes 10 to 25 s to import, and compiles kernels on its first GPU run
]


def decode(ids: list[int]) -> str:
    return "".join(chr(32 + id) for id in ids)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    from omniflow.engine.sglang import load_engine

    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    engine = load_engine(
        folder,
        decode=decode,
        device="gpu" if GPU else "cpu",
        dtype="float32",
        kv_tokens=4096,
        max_running=8,
        max_waiting=16,
        chunked_prefill_size=64,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return TransformersEngine(tiny_llama(), decode=decode)


def assert_same(ours: list[EngineOutput], theirs: list[EngineOutput]) -> None:
    """Equal tokens and ends, up to the first near tie (`theirs` with two `top_logprobs`)."""
    for number, (our, their, logprob) in enumerate(
        zip(ids_of(ours), ids_of(theirs), [each for output in theirs for each in output.logprobs], strict=False)
    ):
        (_, first), (_, second) = logprob.top
        if first - second < MARGIN:
            return
        assert our == their, f"token {number}"
    assert len(ids_of(ours)) == len(ids_of(theirs))
    assert ours[-1].finish_reason == theirs[-1].finish_reason


def greedy(id: str, ids: list[int], **more: object) -> EngineRequest:
    return request(id, ids, top_logprobs=2, **more)


def test_requests_that_join_and_leave_get_the_tokens_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    requests = [greedy(str(number), prompt(5 + 13 * number, number), max_tokens=4 + 3 * number) for number in range(12)]
    ours: dict[str, list[EngineOutput]] = {}
    todo = list(requests)
    while todo or engine.has_work():
        if todo:
            engine.start(todo.pop(0))
        for output in engine.step():
            ours.setdefault(output.id, []).append(output)
    theirs = run(reference, requests)
    for each in requests:
        assert_same(ours[each.id], theirs[each.id])
    assert engine.stats().num_running == engine.stats().num_waiting == engine.stats().kv_tokens_used == 0


def test_embeddings_stand_where_they_are_put(engine: SGLangEngine, reference: TransformersEngine) -> None:
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    asked = EngineRequest(
        id="e",
        ids=prompt(150),
        embeds=rows,
        positions=(4, 70, 149),
        sampling=Sampling(max_tokens=12, top_logprobs=2),
    )
    assert_same(run(engine, [asked])["e"], run(reference, [asked])["e"])


def test_an_answer_is_decoded_without_the_embeddings_of_its_prompt(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang keeps them with the batch, and runs no CUDA graph where a batch has any."""
    runner, decoded = engine._scheduler.tp_worker.model_runner, []
    forward = runner.forward

    def seen(batch: Any, *given: Any, **more: Any) -> Any:
        if batch.forward_mode.is_decode():
            decoded.append(batch.replace_embeds)
        return forward(batch, *given, **more)

    monkeypatch.setattr(runner, "forward", seen)
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    asked = msgspec.structs.replace(request("e", prompt(20, 5), max_tokens=4), embeds=rows, positions=(2, 3, 11))
    assert len(ids_of(run(engine, [asked])["e"])) == 4
    assert decoded and not any(rows is not None for rows in decoded)


def test_the_prefix_cache_never_serves_the_state_of_other_embeddings(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    first, second = (torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    everywhere, nowhere = tuple(range(40)), ()
    cases: list[tuple[torch.Tensor | None, tuple[int, ...]]] = [
        (first, everywhere),
        (second, everywhere),
        (None, nowhere),
        (torch.cat([first[:39], second[39:]]), everywhere),
        (first.flip(0), everywhere),
        (first[:39], everywhere[:39]),
        (first[:39], everywhere[1:]),
        (first, everywhere),
    ]
    for rows, positions in cases:  # all over the same token ids
        asked = EngineRequest(
            id="r",
            ids=[0] * 40 + prompt(8, 5),
            embeds=rows,
            positions=positions,
            sampling=Sampling(max_tokens=10, top_logprobs=2),
        )
        assert_same(run(engine, [asked])["r"], run(reference, [asked])["r"])


def test_the_prefix_cache_serves_a_prompt_again(engine: SGLangEngine, reference: TransformersEngine) -> None:
    asked = greedy("again", prompt(60, 9), max_tokens=6)
    theirs = run(reference, [asked])["again"]
    for _ in range(2):
        assert_same(run(engine, [asked])["again"], theirs)


def test_fed_rows_are_a_prompt(engine: SGLangEngine, reference: TransformersEngine) -> None:
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(3))
    asked = EngineRequest(id="o", ids=prompt(5), open=True, sampling=Sampling(max_tokens=8, top_logprobs=2))
    outputs = []
    for each in (engine, reference):
        each.start(asked)
        each.feed("o", rows[:2], done=False)
        assert ids_of(drain(each).get("o", [])) == []
        each.feed("o", rows[2:], done=True)
        outputs.append(drain(each)["o"])
    assert_same(*outputs)
    engine.feed("o", rows, done=True)  # it has ended: ignored
    assert not engine.has_work()


def test_abort_ends_the_one_that_is_named(engine: SGLangEngine) -> None:
    alone = ids_of(run(engine, [request("10", prompt(9), max_tokens=20)])["10"])
    for id in ("1", "10", "100"):
        engine.start(request(id, prompt(9), max_tokens=20))
    engine.step()
    engine.abort("1")
    engine.abort("nobody")
    outputs = drain(engine)
    assert outputs["1"][-1].finish_reason == "abort"
    assert len(ids_of(outputs["1"])) < 20
    for id in ("10", "100"):
        assert outputs[id][-1].finish_reason == "length"
        assert ids_of(outputs[id])[-10:] == alone[-10:]


def test_abort_of_what_has_not_run(engine: SGLangEngine) -> None:
    engine.start(request("queued", prompt(9)))
    engine.start(EngineRequest(id="open", ids=[], open=True, sampling=Sampling()))
    engine.abort("queued")
    engine.abort("open")
    outputs = drain(engine)
    assert {id: each[-1].finish_reason for id, each in outputs.items()} == {"queued": "abort", "open": "abort"}
    assert engine.stats().num_waiting == 0


def test_stop_tokens_and_stop_strings_end_as_in_the_reference(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    plain = ids_of(run(reference, [request("p", prompt(30, 2), max_tokens=20)])["p"])
    text = decode(plain)
    asked = [
        greedy("token", prompt(30, 2), max_tokens=20, stop_token_ids=frozenset([plain[6]])),
        greedy("at the end", prompt(30, 2), max_tokens=7, stop_token_ids=frozenset([plain[6]])),
        EngineRequest(
            id="text", ids=prompt(30, 2), stop=(text[4:6],), sampling=Sampling(max_tokens=20, top_logprobs=2)
        ),
    ]
    ours, theirs = run(engine, asked), run(reference, asked)
    for each in asked:
        assert theirs[each.id][-1].finish_reason == "stop"
        assert_same(ours[each.id], theirs[each.id])


def test_logprobs_are_those_of_the_model(engine: SGLangEngine, reference: TransformersEngine) -> None:
    asked = request("l", prompt(20, 4), max_tokens=6, top_logprobs=3)
    ours, theirs = run(engine, [asked])["l"], run(reference, [asked])["l"]
    for our, their in zip(ours, theirs, strict=True):
        (first,), (second,) = our.logprobs, their.logprobs
        assert first.id == our.ids[0]
        assert abs(first.logprob - second.logprob) < (0.02 if GPU else 1e-4)
        assert len(first.top) == 3
    assert run(engine, [request("n", prompt(20, 4))])["n"][0].logprobs == ()


def test_biases_and_penalties_change_what_is_drawn(engine: SGLangEngine, reference: TransformersEngine) -> None:
    forced = run(engine, [request("b", prompt(9), max_tokens=5, logit_bias=((7, 100.0),))])["b"]
    assert ids_of(forced) == [7] * 5
    asked = greedy("f", prompt(9), max_tokens=24, frequency_penalty=1.5, presence_penalty=0.5)
    ours = run(engine, [asked])["f"]
    theirs = run(reference, [asked])["f"]
    if GPU:  # logprobs say nothing of how near two tokens are after penalties
        assert ids_of(ours)[:8] == ids_of(theirs)[:8]
    else:
        assert ids_of(ours) == ids_of(theirs)
    assert ids_of(ours) != ids_of(run(engine, [request("g", prompt(9), max_tokens=24)])["g"])


def test_what_cannot_be_done_is_refused_and_the_next_request_runs(engine: SGLangEngine) -> None:
    with pytest.raises(UnsupportedError, match="seed needs deterministic"):
        engine.start(request("s", prompt(5), seed=1, temperature=1.0))
    with pytest.raises(ContextLengthError, match=f"prompt has {CONTEXT} tokens"):
        engine.start(request("c", prompt(CONTEXT)))
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        engine.start(request("i", []))
    with pytest.raises(ProtocolError, match="outside of the vocabulary"):
        engine.start(request("v", [VOCAB]))
    with pytest.raises(InvalidInputError, match=f"logit_bias names the token {VOCAB}"):
        engine.start(request("b", prompt(5), logit_bias=((VOCAB, 1.0),)))
    with pytest.raises(InvalidInputError, match="logit_bias names the token 5 twice"):
        engine.start(request("b", prompt(5), logit_bias=((5, 1.0), (5, 2.0))))
    with pytest.raises(InvalidInputError, match="max_tokens is 0"):
        engine.start(request("b", prompt(5), max_tokens=0))
    with pytest.raises(ProtocolError, match=f"this model takes \\[n, {HIDDEN}\\]"):
        engine.start(
            EngineRequest(id="w", ids=[1], embeds=torch.zeros(1, 3), positions=(0,), sampling=Sampling(max_tokens=1))
        )
    broken = torch.full((1, HIDDEN), torch.nan, device="cuda" if GPU else "cpu")
    with pytest.raises(ProtocolError, match="not finite"):
        engine.start(EngineRequest(id="n", ids=[1], embeds=broken, positions=(0,), sampling=Sampling(temperature=1.0)))
    assert not engine.has_work()
    for number in range(16):
        engine.start(request(f"q{number}", prompt(5), max_tokens=2))
    with pytest.raises(OverloadedError, match="16 generations are waiting"):
        engine.start(request("one more", prompt(5)))
    outputs = drain(engine)
    assert all(outputs[f"q{number}"][-1].finish_reason == "length" for number in range(16))
    assert ids_of(run(engine, [request("s", prompt(5), seed=1)])["s"])  # greedy: nothing is drawn


@pytest.mark.parametrize("option", ODD)
def test_an_odd_value_is_refused_or_answered_and_the_next_request_works(engine: SGLangEngine, option: str) -> None:
    assert_refused_or_answered(engine, option)


def test_no_top_p_is_0_in_float32(engine: SGLangEngine) -> None:
    """A GPU's kernel then draws the token 0, whatever the others are."""
    found = [engine._way(request("p", prompt(5), top_p=top_p)).top_p for top_p in (5e-324, 1e-6, 0.3, 1.0)]
    assert found == [1e-6, 1e-6, 0.3, 1.0]


def test_embeddings_are_finite_as_the_model_has_them(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float32 holds may be infinite in half precision."""
    rows = torch.full((1, HIDDEN), 1e5, device="cuda" if GPU else "cpu")
    asked = EngineRequest(id="h", ids=[1], embeds=rows, positions=(0,), sampling=Sampling(max_tokens=2))
    assert len(ids_of(run(engine, [asked])["h"])) == 2
    monkeypatch.setattr(engine, "_dtype", torch.float16)
    with pytest.raises(ProtocolError, match="not finite"):
        engine.start(asked)
    engine.start(msgspec.structs.replace(asked, embeds=None, positions=(), open=True))
    with pytest.raises(ProtocolError, match="not finite"):
        engine.feed("h", rows, done=True)
    engine.abort("h")
    assert [output.finish_reason for output in drain(engine)["h"]] == ["abort"]


def test_requests_without_a_seed_are_drawn_apart_where_all_is_deterministic(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seed(id: str, **sampling: object) -> int | None:
        return engine._way(request(id, prompt(5), **sampling)).sampling_seed

    assert seed("a") is None
    monkeypatch.setattr(engine, "_deterministic", True)
    assert seed("a") == seed("a") != seed("b")  # by its id, so that several ranks choose alike
    assert seed("a", seed=7) == seed("b", seed=7) == 7
    every = (-(2**63), -1, 0, 1, 2**63 - 1)  # SGLang has them in a tensor of int64
    assert [seed("a", seed=each) for each in every] == list(every)
    assert [seed("a", seed=each) for each in (2**63, 2**64 - 1)] == [-(2**63), -1]


def test_what_draws_by_seed_always_filters(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang draws a seed's tokens by another rule where nobody in a batch filters; what that gives is GPUs' alone."""
    asked = [request("a", prompt(5), **each) for each in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9})]
    assert [engine._way(each).top_k for each in asked] == [1, 2**30, 9]
    monkeypatch.setattr(engine, "_deterministic", True)
    assert [engine._way(each).top_k for each in asked] == [1, VOCAB, 9]


def test_an_id_is_not_free_before_its_abort_is_told(engine: SGLangEngine) -> None:
    engine.start(msgspec.structs.replace(request("x", prompt(5)), open=True))
    engine.abort("x")
    with pytest.raises(ProtocolError, match="runs already"):
        engine.start(request("x", prompt(5), max_tokens=3))
    assert [output.finish_reason for output in drain(engine)["x"]] == ["abort"]
    assert len(ids_of(run(engine, [request("x", prompt(5), max_tokens=3)])["x"])) == 3


def test_a_second_engine_in_a_process_is_refused(engine: SGLangEngine, tmp_path: Path) -> None:
    from omniflow.engine.sglang import load_engine
    from omniflow.errors import StartError

    with pytest.raises(StartError, match="one engine in a process"):
        load_engine(tmp_path, device="gpu" if GPU else "cpu")


@pytest.mark.anyio
async def test_the_loop_drives_it_and_a_reader_that_leaves_aborts(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    class Kept:
        """`engine` without its `close`, stepped by the loop's thread: the other tests need it."""

        def __init__(self) -> None:
            engine._scheduler.step_here()

        def __getattr__(self, name: str) -> object:
            return (lambda: None) if name == "close" else getattr(engine, name)

    loop = EngineLoop(Kept)  # type: ignore[arg-type]
    await loop.setup()
    asked = greedy("loop", prompt(12), max_tokens=9)
    async with loop.generate(asked) as outputs:
        ours = [output async for output in outputs]
    assert_same(ours, run(reference, [asked])["loop"])
    async with loop.generate(request("left", prompt(12), max_tokens=200)) as outputs:
        await outputs.__anext__()
    with pytest.raises(RuntimeError, match="the thread that has built it"):
        engine.step()
    await loop.close()
    engine._scheduler.step_here()
    drain(engine)
    assert engine.stats().kv_tokens_used == 0


@pytest.mark.parametrize("which", ["last", "all"])
def test_hidden_states_are_those_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine, which: str
) -> None:
    asked = [
        msgspec.structs.replace(greedy(f"h{length}", prompt(length, length), max_tokens=6), hidden=which)
        for length in (150, 9, 70)  # the first is read in 3 chunks
    ]
    others = [greedy(str(number), prompt(30 + number, number), max_tokens=3 + number) for number in range(3)]
    for _ in range(2):  # the second time its prompts are in the prefix cache
        ours, theirs = run(engine, [*asked[:1], *others, *asked[1:]]), run(reference, asked)
        for each in asked:
            assert_same(ours[each.id], theirs[each.id])
            mine, wanted = (torch.cat([output.hidden for output in given[each.id]]) for given in (ours, theirs))
            first = len(each.ids) if which == "all" else 1
            assert [len(output.hidden) for output in ours[each.id]] == [first, 1, 1, 1, 1, 1]
            assert (mine.cpu() - wanted)[:first].abs().max() < (1e-2 if GPU else 1e-4)
            if ids_of(ours[each.id]) == ids_of(theirs[each.id]):
                assert (mine.cpu() - wanted).abs().max() < (1e-2 if GPU else 1e-4)
        assert all(output.hidden is None for each in others for output in ours[each.id])


def test_hidden_states_go_to_whom_they_belong_while_others_leave(engine: SGLangEngine) -> None:
    def hidden(id: str, outputs: dict[str, list[EngineOutput]]) -> torch.Tensor:
        return torch.cat([output.hidden for output in outputs[id]])

    asked = [
        msgspec.structs.replace(
            request(str(number), prompt(6 + number, number), max_tokens=3 + 2 * number), hidden="last"
        )
        for number in range(5)
    ]
    together = run(engine, asked)
    for each in asked:
        alone = run(engine, [each])
        assert hidden(each.id, together).shape == (each.sampling.max_tokens, HIDDEN)
        if ids_of(alone[each.id]) == ids_of(together[each.id]):
            assert (hidden(each.id, alone) - hidden(each.id, together)).abs().max() < (1e-2 if GPU else 1e-4)
    assert not engine._scheduler.outbox.asides


def test_places_are_refused_by_a_model_of_one_kind(engine: SGLangEngine) -> None:
    with pytest.raises(ProtocolError, match="places need a model of several kinds"):
        engine.start(msgspec.structs.replace(request("p", [1, 2]), places=torch.zeros(3, 2, dtype=torch.long)))


def test_tokens_that_may_wait_are_told_with_the_last(engine: SGLangEngine) -> None:
    """The first is told at once; a request with a stop string, which each token may end, does not wait."""
    asked = [request("a", prompt(9), max_tokens=12), request("b", prompt(5, 1), max_tokens=6)]
    plain = run(engine, asked)
    engine._scheduler.outbox.gather_s = 1e9
    engine._scheduler.outbox._gave = time.monotonic()
    try:
        gathered = run(engine, [*asked, msgspec.structs.replace(asked[0], id="c", stop=("never",))])
    finally:
        engine._scheduler.outbox.gather_s = 0.0
    assert [ids_of(gathered[id]) for id in "abc"] == [ids_of(plain[id]) for id in "aba"]
    assert [[len(output.ids) for output in gathered[id]] for id in "abc"] == [[1, 11], [1, 5], [1] * 12]


def test_tokens_of_several_ranks_do_not_wait(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of ranks differ, and a rank that tells other tokens in a step than rank 0 is ended."""
    from omniflow.engine import sglang

    outbox = engine._scheduler.outbox
    monkeypatch.setattr(sglang, "build", lambda *_: engine._scheduler)
    monkeypatch.setattr(outbox, "gather_s", 0.0)
    sglang.load_engine(Path(), gather_s=1.0, ranks=Ranks(1, 2))
    assert outbox.gather_s == 0.0
    sglang.load_engine(Path(), gather_s=1.0)
    assert outbox.gather_s == 1.0
