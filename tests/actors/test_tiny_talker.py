from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3Model

from actors.ar_talker import FIRST_STEPS, MOST_STEPS, stretched
from actors.piper.talker import LONGEST_PIECE, SENTENCE_PAUSE
from actors.piper.vocoder import FIRST_FRAMES, PiperDecoder, PiperVocoder
from actors.piper.voice import NUM_CHANNELS
from actors.tiny_talker import TINY_TALKER
from actors.tiny_talker.model import Config, load_model
from actors.tiny_talker.talker import DROPPED_STEPS, TinyTalker, TinyTalkerScript
from actors.whisper.transcriber import transcribe
from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.frames import FrameEngine
from omniflow.engine.loop import Generation
from omniflow.errors import InvalidInputError, OverloadedError, WeightsError
from omniflow.media import AudioChunk, Latents, Segment
from tests.actors.test_piper_phonemes import IPA
from tests.actors.test_piper_speech import longest_silence_s
from tests.doubles import ListEmit, ListStream, Pause, context
from tests.e2e.hearing import word_errors

pytestmark = pytest.mark.anyio
SENTENCES = Path(__file__).with_name("spoken_sentences.txt").read_text().splitlines()
TEXTS = ["Well, the first thing to say is this.", " And here comes the second sentence."]
FRAMES_PER_STEP = 4


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def talker(anyio_backend: str) -> AsyncIterator[TinyTalker]:
    actor = TinyTalker(model=TINY_TALKER.name)
    await actor.setup()
    yield actor
    await actor.close()


@pytest.fixture(scope="module")
async def vocoder(anyio_backend: str) -> PiperVocoder:
    actor = PiperVocoder()
    for weights in actor.weights():
        weights.fetch()
    await actor.setup()
    return actor


@pytest.fixture(scope="module")
def script() -> TinyTalkerScript:
    return TinyTalkerScript(TINY_TALKER.path())


async def speak(talker: TinyTalker, *texts: str, **options: object) -> list[Latents]:
    emit: ListEmit[Latents] = ListEmit()
    segments = [Segment(text, index) for index, text in enumerate(texts)]
    await talker.run(ListStream(segments), emit, context(**options))
    return emit.items


async def say(talker: TinyTalker, vocoder: PiperVocoder, *texts: str, **options: object) -> np.ndarray:
    sound: ListEmit[AudioChunk] = ListEmit()
    await vocoder.run(ListStream(await speak(talker, *texts, **options)), sound)
    return np.concatenate([chunk.samples for chunk in sound.items])


def frames_of(items: list[Latents]) -> np.ndarray:
    return np.concatenate([item.frames for item in items])


def codes_of(engine: FrameEngine, requests: Sequence[EngineRequest]) -> dict[str, torch.Tensor]:
    """Run `requests`, which may be more than step together, to their ends."""
    outputs: dict[str, list[EngineOutput]] = {request.id: [] for request in requests}
    for request in requests:
        engine.start(request)
    while engine.has_work():
        for output in engine.step():
            outputs[output.id].append(output)
    return {
        id: torch.cat([output.frames for output in each if output.frames is not None]) for id, each in outputs.items()
    }


def request_for(script: TinyTalkerScript, text: str, id: str, **sampling: object) -> EngineRequest:
    (prompt,) = script.prompts(text)
    drawn = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "max_tokens": prompt.max_steps, **sampling}
    return EngineRequest(id=id, ids=prompt.ids, sampling=type(script.sampling)(**drawn))


def weights() -> dict[str, torch.Tensor]:
    parts = TINY_TALKER.path().glob("talker-*.safetensors")
    return {name: tensor.float() for part in parts for name, tensor in load_file(part).items()}


def qwen3(part: str, prefix: str) -> Qwen3Model:
    """The layers of one part of config.json, as transformers runs them."""
    shape = Config.load(TINY_TALKER.path())
    size = {"talker_config": shape.talker_config, "code_predictor_config": shape.code_predictor_config}[part]
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=8,
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_hidden_layers,
            num_attention_heads=size.num_attention_heads,
            num_key_value_heads=size.num_key_value_heads,
            head_dim=size.head_dim,
            rms_norm_eps=size.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        )
    )
    own = {name.removeprefix(prefix): tensor for name, tensor in weights().items() if name.startswith(prefix)}
    left_out = model.load_state_dict(own, strict=False).missing_keys
    assert left_out == ["embed_tokens.weight"]
    return model.eval()


def test_both_decoders_are_transformers_qwen3_and_the_codes_are_the_likeliest(script: TinyTalkerScript) -> None:
    """Greedy speech of a real sentence: every step of it, recomputed by transformers over the whole sequence."""
    request = request_for(script, "The quick brown fox jumps over the lazy dog.", "a", temperature=0.0)
    engine = FrameEngine(load_model(TINY_TALKER.path()))
    model = engine._model
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    codes = codes_of(engine, [request])["a"]
    named = weights()
    tables = [named["model.codec_embedding.weight"]]
    tables += [named[f"code_predictor.model.codec_embedding.{q}.weight"] for q in range(7)]
    embedded = torch.stack([table[codes[:, q]] for q, table in enumerate(tables)], dim=1)
    whole = torch.cat([named["model.text_embedding.weight"], named["model.codec_embedding.weight"]])
    inputs = torch.cat([whole[request.ids], embedded.sum(dim=1)])
    with torch.inference_mode():
        hidden = qwen3("talker_config", "model.")(inputs_embeds=inputs[None]).last_hidden_state[0]
        hidden = hidden[len(request.ids) - 1 :][: len(codes)]
        assert (torch.cat(seen)[: len(codes)] - hidden).abs().max() <= 2e-5 * hidden.abs().max()
        inside = torch.cat([hidden[:, None], embedded[:, :-1]], dim=1)
        outputs = qwen3("code_predictor_config", "code_predictor.model.")(inputs_embeds=inside).last_hidden_state
    heads = [named["codec_head.weight"], *(named[f"code_predictor.lm_head.{q}.weight"] for q in range(7))]
    logits = [(hidden if q == 0 else outputs[:, q]) @ head.T for q, head in enumerate(heads)]
    logits[0][:, 1025] = -torch.inf
    for q, each in enumerate(logits):
        behind = each.max(dim=-1).values - each.gather(1, codes[:, q : q + 1])[:, 0]
        assert behind.max() <= 2e-4
    # It was speech, and no silence: the codes change from step to step.
    assert len(codes) > 40
    assert len(codes.unique(dim=0)) > 0.9 * len(codes)


def test_a_seed_gives_the_same_codes_alone_and_in_a_batch_that_changes(script: TinyTalkerScript) -> None:
    requests = [request_for(script, text, str(n), seed=n, max_tokens=12 + n) for n, text in enumerate(SENTENCES[:5])]
    engine = FrameEngine(load_model(TINY_TALKER.path()), max_running=3)
    alone = {each.id: codes_of(engine, [each])[each.id] for each in requests}
    together = codes_of(engine, requests)
    assert all(torch.equal(alone[id], together[id]) for id in alone)
    assert not torch.equal(alone["0"][:10], alone["1"][:10])


def test_the_table_knows_every_phoneme_and_a_prompt_is_as_it_was_trained(script: TinyTalkerScript) -> None:
    config = Config.load(TINY_TALKER.path())
    assert set(config.phonemes.table) >= IPA | set(" ˈˌː.,;:?!^$")
    assert script.ids("hə.") == [1, 20, 59, 10, 2]
    assert script.ids("你") == [1, 2]
    prompt = script.prompt("hə.")
    assert prompt.ids[-1] == 160 + 1025
    assert prompt.max_steps == 16 + 2 * 5
    assert script.prompt("h" * 500).max_steps == 400
    assert (script.prompt("hə").dropped_steps, script.prompt("hə.").dropped_steps) == (DROPPED_STEPS, 0)
    assert (script.prompt("hə,").pause_frames, script.prompt("hə.").pause_frames) == (0, SENTENCE_PAUSE)
    assert len(script.prompts("One sentence. And a second one.")) == 2


@pytest.mark.parametrize(
    "text", ["word " * 210, "a" * 100, "<speak>Hi</speak>", "1e999", "A. B. C. D.", "x" * 30 + "😀"]
)
def test_odd_texts_become_prompts_that_the_model_was_trained_for(script: TinyTalkerScript, text: str) -> None:
    prompts = script.prompts(text)
    assert prompts
    assert all(3 < len(prompt.ids) <= LONGEST_PIECE + 4 for prompt in prompts)
    assert all(prompt.max_steps <= 400 for prompt in prompts)


def test_an_engine_that_owns_its_process_gets_one() -> None:
    assert TinyTalker.wants_process({"engine": "sglang"})
    assert not TinyTalker.wants_process({})


def test_sglang_is_for_gpus_and_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "set device='gpu', or engine='reference'" in str(TinyTalker.refuses_cpu({"engine": "sglang"}))
    assert "needs SGLang" in str(TinyTalker.lacks({"engine": "sglang"}, "gpu"))
    assert TinyTalker.refuses_cpu({}) is None and TinyTalker.lacks({}, "cpu") is None


def test_a_frame_is_the_sum_of_its_codes_in_the_codebooks(script: TinyTalkerScript) -> None:
    codes = np.arange(16).reshape(2, 8)
    frames = script.frames(codes)
    assert frames.shape == (8, NUM_CHANNELS)
    assert frames.dtype == np.float32
    assert np.array_equal(frames[5], script._codebooks[0, 10] + script._codebooks[1, 11])
    assert script.frames(np.zeros((0, 8), np.int64)).shape == (0, NUM_CHANNELS)


async def test_segments_become_latents_in_order_and_end(talker: TinyTalker) -> None:
    items = await speak(talker, *TEXTS, seed=1)
    assert [item.segment for item in items] == sorted(item.segment for item in items)
    for index in (0, 1):
        assert [item.last for item in items if item.segment == index] == [False] * (
            sum(item.segment == index for item in items) - 1
        ) + [True]
    for item in items:
        assert item.frames.dtype == np.float32
        assert item.frames.flags.c_contiguous
        assert item.frames.shape[1] == NUM_CHANNELS
        assert len(item.frames) <= FRAMES_PER_STEP * (MOST_STEPS + DROPPED_STEPS) + SENTENCE_PAUSE
    for first, size in ((items[0], FIRST_STEPS), (items[1], MOST_STEPS // 2), (items[2], MOST_STEPS)):
        assert len(first.frames) == FRAMES_PER_STEP * size
    assert len(next(item.frames for item in items if item.segment == 1)) == FRAMES_PER_STEP * MOST_STEPS // 2
    assert len(items[0].frames) == FRAMES_PER_STEP * FIRST_STEPS >= FIRST_FRAMES + PiperDecoder.holdback


async def test_a_seed_gives_the_same_frames_alone_and_beside_others(talker: TinyTalker) -> None:
    alone = [frames_of(await speak(talker, "Good morning.", "Yes.", seed=seed)) for seed in (7, 8)]
    together: dict[int, np.ndarray] = {}

    async def one(seed: int) -> None:
        together[seed] = frames_of(await speak(talker, "Good morning.", "Yes.", seed=seed))

    async with anyio.create_task_group() as group:
        group.start_soon(one, 7)
        group.start_soon(one, 8)
    assert np.array_equal(together[7], alone[0])
    assert np.array_equal(together[8], alone[1])
    assert alone[0].shape != alone[1].shape or not np.allclose(alone[0], alone[1])


async def test_without_a_seed_no_two_are_alike_and_any_integer_is_one(talker: TinyTalker) -> None:
    once, again = [frames_of(await speak(talker, "Good morning.")) for _ in range(2)]
    assert once.shape != again.shape or not np.allclose(once, again)
    for seed in (-1, 2**80):
        assert len(await speak(talker, "Yes.", seed=seed)) > 0


async def test_speech_is_the_same_whether_its_text_is_here_or_comes(talker: TinyTalker) -> None:
    """The next utterance begins early where the text is here; what is said does not depend on it."""
    texts = ["Well, I went home.", " Yes.", " No."]
    at_once = await speak(talker, *texts, seed=5)
    emit: ListEmit[Latents] = ListEmit()
    segments = [each for index, text in enumerate(texts) for each in (Pause(0.05 * index), Segment(text, index))]
    await talker.run(ListStream(segments), emit, context(seed=5))
    assert np.array_equal(frames_of(emit.items), frames_of(at_once))
    assert [item.segment for item in emit.items if item.last] == [0, 1, 2]


async def test_requests_beyond_the_queue_are_refused_and_the_others_spoken() -> None:
    full = TinyTalker(model=TINY_TALKER.name, max_running=1, max_waiting=1)
    await full.setup()
    outcomes: list[object] = []

    async def one() -> None:
        try:
            outcomes.append(len(await speak(full, "Yes.")))
        except OverloadedError as error:
            outcomes.append(type(error))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(one)
    await full.close()
    assert OverloadedError in outcomes
    assert any(outcome != OverloadedError for outcome in outcomes)


async def test_the_first_words_of_a_request_are_urgent(talker: TinyTalker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, generate = [], talker._loop.generate

    def noted(request: EngineRequest) -> AbstractAsyncContextManager[Generation]:
        asked.append(request)
        return generate(request)

    monkeypatch.setattr(talker._loop, "generate", noted)
    await speak(talker, "...", "Yes.", "No.", seed=1)
    assert [request.urgent for request in asked] == [True, False]


async def test_a_cancelled_request_leaves_the_engine(talker: TinyTalker) -> None:
    with anyio.move_on_after(0.05):
        await speak(talker, "word " * 60)
    await speak(talker, "Yes.")
    assert talker.engine_stats().num_running == 0 < talker.engine_stats().kv_tokens_total


@pytest.mark.parametrize("speed", [0.0, 0.49, 2.1, -1.0, float("nan"), float("inf")])
async def test_other_speeds_are_refused(talker: TinyTalker, speed: float) -> None:
    with pytest.raises(InvalidInputError, match=r"give 0\.5 to 2\.0") as refused:
        await speak(talker, *TEXTS, speed=speed)
    assert refused.value.param == "speed"


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.0, 1.3, 2.0])
def test_stretched_frames_do_not_depend_on_chunks(speed: float) -> None:
    frames = np.arange(103.0)[:, None]
    whole = stretched(frames, 0, speed)
    bounds = [0, 28, 28, 60, 101, 103]
    parts = [stretched(frames[a:b], a, speed) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert abs(len(whole) - 103 / speed) <= 1
    assert (np.diff(whole[:, 0]) >= 0).all()
    assert whole[0, 0] <= 1
    assert whole[-1, 0] >= 101


async def test_a_segment_without_words_is_left_out(talker: TinyTalker) -> None:
    items = await speak(talker, "你好。", "Yes.", "🙂", "...", "No.")
    assert {item.segment for item in items} == {1, 4}
    assert await speak(talker, "?!", "🙂🙂") == []


async def test_it_is_understood(talker: TinyTalker, vocoder: PiperVocoder) -> None:
    heard = transcribe(await say(talker, vocoder, *SENTENCES[2:6], seed=1), 24000)
    errors, count = word_errors(" ".join(SENTENCES[2:6]), heard)
    assert errors / count <= 0.2


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_corpus_is_understood(talker: TinyTalker, vocoder: PiperVocoder) -> None:
    errors: list[tuple[int, int]] = []

    async def one(number: int) -> None:
        samples = await say(talker, vocoder, SENTENCES[number], seed=number)
        errors.append(word_errors(SENTENCES[number], await anyio.to_thread.run_sync(transcribe, samples, 24000)))

    assert len(SENTENCES) >= 64
    for start in range(0, len(SENTENCES), 8):
        async with anyio.create_task_group() as group:
            for number in range(start, min(start + 8, len(SENTENCES))):
                group.start_soon(one, number)
    wrong, total = (sum(column) for column in zip(*errors, strict=True))
    assert wrong / total <= 0.1


async def test_it_is_understood_fast(talker: TinyTalker, vocoder: PiperVocoder) -> None:
    samples = await say(talker, vocoder, "Please bring two cups of coffee to the kitchen.", seed=1, speed=1.5)
    assert word_errors("please bring 2 cups of coffee to the kitchen", transcribe(samples, 24000))[0] <= 2


async def test_segments_of_one_reply_are_heard_in_order(talker: TinyTalker, vocoder: PiperVocoder) -> None:
    samples = await say(
        talker, vocoder, "My sister planted", " yellow flowers behind the house.", " 你好 ", "It will rain.", seed=2
    )
    heard = transcribe(samples, 24000)
    assert word_errors("my sister planted yellow flowers behind the house it will rain", heard)[0] <= 3


async def test_a_sentence_is_followed_by_a_breath(talker: TinyTalker, vocoder: PiperVocoder) -> None:
    """0.25 to 0.8 s of silence between two sentences, and none of 0.3 s within one that was cut amid a phrase."""
    assert 0.25 <= longest_silence_s(await say(talker, vocoder, "I went home.", " He stayed there.", seed=1)) <= 0.8
    assert longest_silence_s(await say(talker, vocoder, "The old man", " walked along the river", seed=1)) < 0.3


def test_the_package_is_a_wheel_of_weights_and_where_they_come_from(tmp_path: Path) -> None:
    package = Path(__file__).parents[2] / "packages" / TINY_TALKER.package
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(package)]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        notice = next(name for name in sizes if name.endswith("NOTICE"))
        assert "LICENCE: NOT SETTLED" in archive.read(notice).decode()
    assert sum(sizes[f"omniflow_tiny_talker/{name}"] for name in TINY_TALKER.files) == TINY_TALKER.size_bytes
    assert [name for name in sizes if name.endswith(".py")] == ["omniflow_tiny_talker/__init__.py"]


def test_a_folder_that_holds_no_talker_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="config.json is no tiny talker's"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_bytes((TINY_TALKER.path() / "config.json").read_bytes())
    with pytest.raises(WeightsError, match="does not hold the weights of a tiny talker"):
        load_model(tmp_path)
