"""Values at the ends of what a request's options can be, and beyond: none may be the end of an engine."""

from __future__ import annotations

import math

from actors.thinker import sampling_for
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import Options
from tests.engine.tiny import CONTEXT, VOCAB, drain, ids_of, prompt, request, run

_FLOATS = (0.0, 5e-324, 1e-38, 1e-7, -1e-38, 1e308, math.inf, -math.inf, math.nan)
_INTS = (0, -1, 2**31 - 1, 2**31, 2**40, 2**63, 2**64 - 1, -(2**63), 2**100)
ODD: dict[str, tuple[object, ...]] = {
    "temperature": (*_FLOATS, 5.0),
    "top_p": (*_FLOATS, 1.0),
    "top_k": (*_INTS, 1),
    "max_tokens": _INTS,
    "seed": _INTS,
    "frequency_penalty": (*_FLOATS, 2.0, -2.0),
    "presence_penalty": (*_FLOATS, 2.0, -2.0),
    "repetition_penalty": (*_FLOATS, 0.01, 100.0),
    "logit_bias": (
        *(((3, bias),) for bias in (*_FLOATS, 100.0, -100.0)),
        *(((token, 1.0),) for token in _INTS),
        tuple((token, -100.0) for token in range(VOCAB)),
    ),
    "top_logprobs": (*_INTS, 20),
    "stop": (("",), ("x" * 100_000,), ("x",) * 17, ("\ud800",), ("\ufffd",), ("\0",)),
}


def assert_refused_or_answered(engine: Engine, name: str) -> None:
    """Each odd value of the option `name` is refused by that name, or answered, and then the next request works."""
    for value in ODD[name]:
        options = Options(**{"temperature": 1.0, "max_tokens": 3, name: value})
        try:
            sampling = sampling_for(options, Sampling())
            engine.start(EngineRequest(id="odd", ids=prompt(CONTEXT - 20), sampling=sampling, stop=options.stop))
        except (InvalidInputError, UnsupportedError) as error:
            assert error.param == name, f"{value!r}: {error}"
        else:
            assert drain(engine)["odd"][-1].finish_reason in ("stop", "length"), value
        assert len(ids_of(run(engine, [request("next", prompt(7), max_tokens=2, temperature=0.9)])["next"])) == 2
