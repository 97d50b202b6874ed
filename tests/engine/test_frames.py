from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3Model

from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.decoder import DecoderShape
from omniflow.engine.frames import FrameEngine, FrameModel
from omniflow.engine.heads import ParallelHead, TokenHead
from omniflow.engine.loop import EngineLoop
from omniflow.errors import ContextLengthError, InvalidInputError, OverloadedError, ProtocolError
from tests.engine.tiny import drain, prompt, run

VOCAB, HIDDEN, CONTEXT = 97, 32, 128
CODES, BEGIN, END = 20, 20, 21
SHAPE = DecoderShape(HIDDEN, 48, 2, 4, 2, 8, CONTEXT)


def qwen3() -> Qwen3Model:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta},
        initializer_range=0.3,
    )
    return Qwen3Model(config).eval()


def model(end: bool = True) -> FrameModel:
    """A frame is 3 codes, told at once and without delays; where not `end`, speech never does."""
    backbone = qwen3()
    head = ParallelHead(HIDDEN, CODES + 2, [0, 0, 0], BEGIN, END)
    torch.manual_seed(12)
    head.head.weight.data.normal_(std=0.4)
    head.embedding.weight.data.normal_()
    if not end:
        head._bias[0, END] = -torch.inf
    model = FrameModel(SHAPE, nn.Embedding.from_pretrained(backbone.embed_tokens.weight.detach()), head)
    model.decoder.load(backbone.state_dict(), "")
    return model.requires_grad_(False).eval()


def asked(id: str, ids: list[int], **sampling: object) -> EngineRequest:
    return EngineRequest(id=id, ids=ids, sampling=Sampling(**{"max_tokens": 12, "temperature": 1.0, **sampling}))


def frames_of(outputs: list[EngineOutput]) -> torch.Tensor:
    return torch.cat([output.frames for output in outputs if output.frames is not None])


def test_frames_are_those_of_qwen3_fed_with_its_own_feedback() -> None:
    engine, reference = FrameEngine(model(end=False)), qwen3()
    engine.start(asked("a", prompt(9), temperature=0.0))
    frames = frames_of(drain(engine)["a"])
    whole = model(end=False)
    inputs = reference.embed_tokens(torch.tensor([prompt(9)]))
    with torch.inference_mode():
        for codes in frames:
            hidden = reference(inputs_embeds=inputs).last_hidden_state[0, -1]
            logits = (hidden @ whole.head.head.weight.T).view(3, -1) + whole.head._bias
            assert torch.equal(logits.argmax(dim=-1), codes)
            feedback = whole.head.embedding(codes + torch.arange(3) * (CODES + 2)).sum(dim=0)
            inputs = torch.cat([inputs, feedback[None, None]], dim=1)
    assert len(frames) == 12
    assert len({tuple(codes) for codes in frames.tolist()}) > 3


def test_requests_join_and_leave_at_any_step_and_each_gets_what_it_gets_alone() -> None:
    requests = [asked(str(n), prompt(3 + 17 * n, seed=n), seed=n, max_tokens=5 + 4 * n) for n in range(5)]
    alone = {}
    for each in requests:
        engine = FrameEngine(model(), chunk=16)
        engine.start(each)
        alone[each.id] = drain(engine)[each.id]
    engine, together = FrameEngine(model(), max_running=3, chunk=16), {}
    for each in requests:
        engine.start(each)
        for output in [*engine.step(), *engine.step()]:
            together.setdefault(output.id, []).append(output)
    for id, outputs in drain(engine).items():
        together.setdefault(id, []).extend(outputs)
    for id, outputs in alone.items():
        assert torch.equal(frames_of(outputs), frames_of(together[id]))
        assert [output.finish_reason for output in outputs] == [output.finish_reason for output in together[id]]
    assert len({len(outputs) for outputs in alone.values()}) > 2


def test_it_ends_by_itself_or_at_the_cap() -> None:
    engine = FrameEngine(model())
    engine.start(asked("a", prompt(5), seed=3, max_tokens=100))
    ended = drain(engine)["a"]
    assert ended[-1].finish_reason == "stop"
    assert ended[-1].frames is None
    engine = FrameEngine(model(end=False))
    engine.start(asked("b", prompt(5), max_tokens=7))
    capped = drain(engine)["b"]
    assert [output.finish_reason for output in capped] == [None] * 6 + ["length"]
    assert frames_of(capped).shape == (7, 3)
    engine.start(asked("c", prompt(CONTEXT - 4), max_tokens=10**9))
    assert frames_of(drain(engine)["c"]).shape == (5, 3)
    assert engine.stats().kv_tokens_used == 0


def test_later_codes_have_their_own_knobs() -> None:
    engine = FrameEngine(model(end=False))
    drawn = asked("a", prompt(5), seed=1)
    engine.start(drawn)
    engine.start(EngineRequest(id="b", ids=drawn.ids, sampling=drawn.sampling, later_codes=Sampling(temperature=0.0)))
    first = {id: frames_of(outputs)[0] for id, outputs in drain(engine).items()}
    assert first["a"][0] == first["b"][0]
    assert not torch.equal(first["a"], first["b"])


def test_an_aborted_request_leaves_and_the_others_do_not_notice() -> None:
    engine = FrameEngine(model(end=False), max_running=1)
    engine.start(asked("a", prompt(5), seed=1))
    engine.start(asked("b", prompt(5), seed=2))
    engine.step()
    for id in ("a", "b", "nobody"):
        engine.abort(id)
    assert [(output.id, output.finish_reason) for output in engine.step()] == [("a", "abort"), ("b", "abort")]
    assert not engine.has_work()
    engine.start(asked("a", prompt(5), seed=1))
    assert len(frames_of(drain(engine)["a"])) == 12


def test_a_prompt_can_be_fed_and_can_be_embeddings() -> None:
    whole = model()
    engine = FrameEngine(whole)
    engine.start(asked("ids", prompt(20), seed=4))
    expected = frames_of(drain(engine)["ids"])
    rows = whole.embedding(torch.tensor(prompt(20)))
    engine.start(
        EngineRequest(
            id="embeds", ids=[0] * 20, sampling=asked("", [0], seed=4).sampling, embeds=rows, positions=tuple(range(20))
        )
    )
    engine.start(EngineRequest(id="fed", ids=prompt(20)[:3], sampling=asked("", [0], seed=4).sampling, open=True))
    engine.feed("fed", rows[3:12], done=False)
    waiting = drain(engine)
    assert set(waiting) == {"embeds"}
    assert torch.equal(frames_of(waiting["embeds"]), expected)
    engine.feed("fed", rows[12:], done=True)
    assert torch.equal(frames_of(drain(engine)["fed"]), expected)


def test_a_top_p_of_0_draws_the_likeliest_code() -> None:
    engine = FrameEngine(model(end=False))
    found = run(engine, [asked("none", prompt(4), top_p=0.0, seed=1), asked("greedy", prompt(4), temperature=0.0)])
    assert torch.equal(frames_of(found["none"]), frames_of(found["greedy"]))


def test_what_cannot_run_is_refused_and_the_next_request_works() -> None:
    engine = FrameEngine(model(), max_running=1, max_waiting=2, kv_tokens=64)
    with pytest.raises(InvalidInputError, match="at least 1 input"):
        engine.start(asked("a", []))
    with pytest.raises(ContextLengthError, match="at most 63 fit"):
        engine.start(asked("a", prompt(64)))
    with pytest.raises(ProtocolError, match=f"outside of the vocabulary of {VOCAB}"):
        engine.start(asked("a", [VOCAB]))
    with pytest.raises(InvalidInputError, match="max_tokens is 0; an answer has 1 token or more"):
        engine.start(asked("a", prompt(4), max_tokens=0))
    with pytest.raises(ProtocolError, match="outside of the prompt"):
        engine.start(EngineRequest(id="a", ids=[1], sampling=Sampling(), embeds=torch.zeros(1, HIDDEN), positions=(1,)))
    with pytest.raises(ProtocolError, match="places and kinds need a model of several kinds"):
        engine.start(EngineRequest(id="a", ids=[1], sampling=Sampling(), kinds=torch.zeros(1, dtype=torch.uint8)))
    with pytest.raises(ProtocolError, match=rf"takes \[n, {HIDDEN}\]"):
        engine.start(EngineRequest(id="a", ids=[1], sampling=Sampling(), embeds=torch.zeros(1, 3), positions=(0,)))
    engine.start(asked("a", prompt(4), seed=1))
    with pytest.raises(ProtocolError, match="runs already"):
        engine.start(asked("a", prompt(4)))
    with pytest.raises(ProtocolError, match="not open"):
        engine.feed("a", torch.zeros(1, HIDDEN), done=True)
    engine.start(asked("b", prompt(4), seed=1))
    with pytest.raises(OverloadedError, match="2 generations are waiting"):
        engine.start(asked("c", prompt(4)))
    outputs = drain(engine)
    assert torch.equal(frames_of(outputs["a"]), frames_of(outputs["b"]))


def test_urgent_ones_run_before_others_that_wait() -> None:
    engine = FrameEngine(model(), max_running=1)
    for id in ("a", "b", "urgent"):
        request = asked(id, prompt(4), seed=1, max_tokens=2)
        engine.start(msgspec.structs.replace(request, urgent=id == "urgent"))
    assert list(drain(engine)) == ["urgent", "a", "b"]


@pytest.mark.anyio
async def test_a_loop_runs_it() -> None:
    head = TokenHead(HIDDEN, CODES, stop_ids=[END - 2])
    loop = EngineLoop(lambda: FrameEngine(FrameModel(SHAPE, nn.Embedding(VOCAB, HIDDEN), head).requires_grad_(False)))
    await loop.setup()
    async with loop.generate(asked("a", prompt(5), temperature=0.0, max_tokens=4)) as outputs:
        got = [output async for output in outputs]
    await loop.close()
    assert got[-1].finish_reason in ("stop", "length")
    assert all(output.frames.shape == (1, 1) for output in got if output.frames is not None)
