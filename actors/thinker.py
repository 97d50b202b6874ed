"""The thinker: a language model that answers token by token."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from actors.answer_grammar import AnswerGrammar, answer_grammar
from actors.checkpoint import language_part, read_json
from actors.roles import ThinkerRole
from actors.stage import GATHER_S, EngineStage
from actors.tokenizer import load_tokenizer
from actors.tool_format import HERMES
from omniflow.actor import Context, Count, Emit
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.engine.group import follow, lead
from omniflow.engine.loop import EngineLoop
from omniflow.errors import ConfigError, InvalidInputError, StartError, UnsupportedError, WeightsError
from omniflow.media import Generated, HiddenStates, Options, TokenPrompt, Tokens

if TYPE_CHECKING:
    import numpy as np
    import torch
    from tokenizers import Tokenizer

    from omniflow.engine.grammar import Grammars

MAX_TEMPERATURE = 5.0
MAX_PENALTY = 2.0
REPETITION = (0.01, 100.0)
"""The least and the greatest. Nobody wants those; far beyond them a logit would be infinite."""
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
SEEDS = range(-(2**63), 2**64)
"""What a torch generator takes."""
MAX_INT = 2**31 - 1
"""SGLang has `top_k` in 32 bits, and ends where it does not fit; so do ranks where one cannot tell another a number."""


class Thinker(EngineStage, ThinkerRole):
    """A decoder-only language model; requests share a running batch.

    `temperature`, `top_p`, `top_k` (0: all), `repetition_penalty` (None: the checkpoint's own) and `max_tokens` hold
    where a request says nothing; the defaults of the first two are those that SmolLM2's authors recommend. `kv_tokens`
    bounds the tokens of all running requests together, `max_running` and `max_waiting` the number of requests; beyond
    them OverloadedError (429). With a `seed` a request draws the same tokens alone and in any batch.

    `engine` sglang is for GPUs: SGLang in this process, which it has for itself. There `dtype` is that of the weights
    (auto: the checkpoint's), `kv_tokens` are reserved at the start, and a `seed` needs `deterministic`, which costs
    speed. Prompts of up to 1,024 tokens are read as CUDA graphs, which halves the time to the first token and takes 0.1
    to 0.3 GB; a model that cannot is started with `prompt_graphs` false. The engine transformers computes in float32.

    An answer that a request wants as JSON, or as calls of tools, is held to it while it is written
    (actors/answer_grammar.py): it is whole and follows its schema, unless `max_tokens` cut it.
    """

    cpu_engine = "transformers"
    # 3 s of a restart's 5 s were these imports.
    preload = ("torch", "omniflow.engine.transformers", "transformers.models.llama.modeling_llama")

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        threads: int = 1,
        max_tokens: Count = 512,
        temperature: float = 0.2,
        top_p: float = 0.9,
        top_k: int = 0,
        repetition_penalty: float | None = None,
        max_running: Count = 8,
        max_waiting: Count = 64,
        kv_tokens: Count = 16384,
        engine: Literal["transformers", "sglang"] = "transformers",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        deterministic: bool = False,
        prompt_graphs: bool = True,
    ) -> None:
        super().__init__(model, device, threads)
        if engine == "transformers" and dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={dtype!r} is for engine='sglang': the engine transformers computes in float32")
        self._engine = engine
        self._sglang: dict[str, Any] = {
            "dtype": dtype,
            "deterministic": deterministic,
            "prompt_graphs": prompt_graphs,
        }
        self._defaults = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
        self._repetition_penalty = repetition_penalty
        self._limits: dict[str, Any] = {"max_running": max_running, "max_waiting": max_waiting, "kv_tokens": kv_tokens}

    @classmethod
    def refuses_tp(cls, settings: Mapping[str, Any]) -> str | None:
        return None if cls.wants_process(settings) else "its engine runs on one GPU; set engine='sglang'"

    async def setup(self) -> None:
        """Raises WeightsError where the model cannot be loaded, StartError where it cannot be split by `tp`."""
        folder = await self.offload(self._load)
        gather_s = GATHER_S if self._engine == "sglang" else 0.0
        self._loop = EngineLoop(lambda: lead(self.load_engine(folder), self.ranks), gather_s=gather_s)
        await self._loop.setup()

    def follow(self) -> None:
        follow(self.load_engine(self._load()), self.ranks)

    def _load(self) -> Path:
        """All but the engine; gives the folder of the weights."""
        folder = self._weights.path()
        _refuse_heads(folder, self.ranks.size)
        penalty = self._repetition_penalty
        self._defaults = msgspec.structs.replace(
            self._defaults,
            stop_token_ids=end_token_ids(folder),
            repetition_penalty=recommended_penalty(folder) if penalty is None else penalty,
        )
        self._tokenizer = load_tokenizer(folder)
        self._grammars = _grammars(self._tokenizer, folder, self._defaults.stop_token_ids)
        return folder

    async def run(self, prompt: TokenPrompt, emit: Emit[Tokens], hidden: Emit[HiddenStates], ctx: Context) -> Generated:
        """See the class. Where somebody reads `hidden`, the whole prompt is computed, whatever is known of it."""
        request = EngineRequest(
            id=ctx.run_id,
            ids=prompt.ids,
            sampling=self._sampling(ctx.options),
            grammar=await self._grammar(ctx.options),
            stop=ctx.options.stop,
            embeds=_tensor(prompt.rows),
            positions=prompt.positions,
            places=_tensor(prompt.places),
            kinds=_tensor(prompt.kinds),
            hidden="all" if hidden.wanted else None,
        )
        count = 0
        reason: Literal["stop", "length"] = "stop"
        async with self._loop.generate(request) as outputs:
            async for output in outputs:
                count += len(output.ids)
                if output.hidden is not None:
                    await hidden.send(HiddenStates(await self.offload(_float_rows, output.hidden)))
                if output.ids:
                    await emit.send(Tokens(output.ids, output.logprobs))
                if output.finish_reason == "length":
                    reason = "length"
        return Generated(reason, len(prompt.ids), count, prompt.audio_tokens, prompt.image_tokens)

    def _sampling(self, options: Options) -> Sampling:
        sampling = sampling_for(options, self._defaults)
        if sampling.seed is None and self._sglang["deterministic"]:
            # The engine would take the request's name, which others have after a restart, and on other hosts.
            return msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        return sampling

    async def _grammar(self, options: Options) -> str | None:
        """What the answer is held to, ready for the engine."""
        if options.json_schema is None and not options.tools and options.tool_choice == "auto":
            return None
        answer = await self.offload(answer_grammar, options, HERMES)
        if answer is None:
            return None
        if self._grammars is None:
            raise UnsupportedError("this model cannot be held to a schema: its tokens are no bytes", param=answer.param)
        await self.offload(_compile, self._grammars, answer)
        return answer.text

    def load_engine(self, folder: Path) -> Engine:
        """The engine of the checkpoint in `folder`; called in the thread that steps it. Raises WeightsError."""
        # Imports torch, so not at the top: a graph is checked and explained without it.
        if self._engine == "sglang":
            from omniflow.engine import sglang

            return sglang.load_engine(
                folder,
                decode=self._tokenizer.decode,
                grammars=self._grammars,
                device=self._device,
                threads=self._threads,
                gather_s=GATHER_S,
                ranks=self.ranks,
                **self._limits,
                **self._sglang,
            )
        from omniflow.engine.transformers import load_engine

        return load_engine(
            folder,
            decode=self._tokenizer.decode,
            grammars=self._grammars,
            device=self._device,
            threads=self._threads,
            **self._limits,
        )


_SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "top_logprobs",
)
"""Fields that `Options` and `Sampling` have in common."""


def sampling_for(options: Options, defaults: Sampling) -> Sampling:
    """How to draw for a request with `options`. Raises InvalidInputError that names the field and what would pass."""
    wanted = msgspec.structs.asdict(options)
    sampling = msgspec.structs.replace(
        defaults, **{name: wanted[name] for name in _SAMPLED if wanted[name] is not None}
    )
    _require(0 <= sampling.temperature <= MAX_TEMPERATURE, "temperature", f"from 0 to {MAX_TEMPERATURE:g}")
    _require(0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1")
    _require(0 <= sampling.top_k <= MAX_INT, "top_k", f"from 0 (no limit) to {MAX_INT}")
    _require(1 <= sampling.max_tokens <= MAX_INT, "max_tokens", f"from 1 to {MAX_INT}")
    _require(sampling.seed is None or sampling.seed in SEEDS, "seed", "a 64-bit integer")
    for name in ("frequency_penalty", "presence_penalty"):
        _require(-MAX_PENALTY <= wanted[name] <= MAX_PENALTY, name, f"from -{MAX_PENALTY:g} to {MAX_PENALTY:g}")
    least, most = REPETITION
    _require(least <= sampling.repetition_penalty <= most, "repetition_penalty", f"from {least:g} to {most:g}")
    biases = sampling.logit_bias
    _require(
        len(biases) <= MAX_BIASES and all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in biases),
        "logit_bias",
        f"at most {MAX_BIASES} tokens, each with a number from -{MAX_BIAS:g} to {MAX_BIAS:g}",
    )
    top = sampling.top_logprobs
    _require(top is None or 0 <= top <= MAX_TOP_LOGPROBS, "top_logprobs", f"from 0 to {MAX_TOP_LOGPROBS}")
    _require(len(options.stop) <= MAX_STOPS and all(options.stop), "stop", f"at most {MAX_STOPS} strings, none empty")
    whole = (each.encode(errors="ignore").decode() == each for each in options.stop)
    _require(all(whole), "stop", "text, without halves of surrogate pairs")
    return sampling


def end_token_ids(folder: Path) -> frozenset[int]:
    """The tokens that end an answer, as generation_config.json, config.json or else tokenizer_config.json says.

    Raises WeightsError where a file is broken or none names one.
    """
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        for part in (config, language_part(config)):
            try:
                found = msgspec.convert(part.get("eos_token_id"), int | list[int] | None)
            except msgspec.ValidationError as error:
                raise WeightsError(f"{folder / name} is broken: {error}") from error
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    if token is not None:
        end = load_tokenizer(folder).token_to_id(token["content"] if isinstance(token, dict) else token)
        if end is not None:
            return frozenset([end])
    raise WeightsError(
        f"{folder}: neither generation_config.json nor config.json names an eos_token_id, "
        "nor tokenizer_config.json an eos_token"
    )


def recommended_penalty(folder: Path) -> float:
    """The repetition penalty of the checkpoint's generation_config.json, 1 where it says nothing.

    Raises WeightsError where the file is broken.
    """
    file = folder / "generation_config.json"
    try:
        found = msgspec.convert(read_json(file).get("repetition_penalty"), float | None)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{file} is broken: repetition_penalty: {error}") from error
    return 1.0 if found is None else found


def _refuse_heads(folder: Path, tp: int) -> None:
    """Raises StartError where the model in `folder` has attention heads that `tp` GPUs cannot share evenly."""
    if tp == 1:
        return
    config = language_part(read_json(folder / "config.json"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    # Of keys and values a GPU may have a head that others have, too.
    fit = [each for each in range(1, heads + 1) if heads % each == 0 and 0 in (kv_heads % each, each % kv_heads)]
    if tp not in fit:
        raise StartError(
            f"tp={tp} does not divide its {heads} attention heads ({kv_heads} of keys and values); "
            f"{', '.join(map(str, fit))} do"
        )


def _require(good: bool, param: str, wanted: str) -> None:
    if not good:
        raise InvalidInputError(f"{param} must be {wanted}", param=param)


def _grammars(tokenizer: Tokenizer, folder: Path, end_ids: frozenset[int]) -> Grammars | None:
    """None where the tokenizer is of a kind that no grammar can be applied to."""
    from omniflow.engine.grammar import Grammars

    config = read_json(folder / "config.json")
    try:
        return Grammars(tokenizer.to_str(), language_part(config)["vocab_size"], end_ids)
    except StartError:
        return None


def _compile(grammars: Grammars, answer: AnswerGrammar) -> None:
    """Raises InvalidInputError that names the part of the request which cannot be followed, and why."""
    from omniflow.engine.grammar import check_grammar

    if answer.text in grammars:
        return
    for part in answer.parts:
        check_grammar(part.text, part.what, part.param)
    grammars.compile(answer.text, answer.param)


def _float_rows(hidden: torch.Tensor) -> np.ndarray:
    rows: np.ndarray = hidden.float().cpu().numpy()
    return rows


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    if values is None:
        return None
    import torch

    return torch.tensor(values)  # a copy: they may be a view into memory that is lent for this call only
