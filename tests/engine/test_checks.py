"""What engines of text refuse; each engine's own tests cover what it adds, and that it asks."""

from __future__ import annotations

import pytest
import torch

from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.checks import check_length, check_prompt, refuse_kinds, refuse_text
from omniflow.errors import ContextLengthError, InvalidInputError, ProtocolError

PLACES, KINDS = torch.zeros(3, 2, dtype=torch.long), torch.zeros(2, dtype=torch.uint8)


def asked(**fields: object) -> EngineRequest:
    return EngineRequest(**{"id": "a", "ids": [1, 9], "sampling": Sampling(), **fields})


def check(request: EngineRequest, decodes: bool = True, knows_kinds: bool = True) -> None:
    check_prompt(request, vocab_size=10, width=4, decodes=decodes, knows_kinds=knows_kinds)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ("x",)},
        {"ids": [], "open": True},
        {"embeds": torch.zeros(2, 4), "positions": (0, 1)},
        {"embeds": torch.zeros(0, 4)},
        {"places": PLACES, "kinds": KINDS},
        {"sampling": Sampling(logit_bias=((0, 1.0), (9, -1.0)))},
    ],
)
def test_what_fits_passes(fields: dict[str, object]) -> None:
    check(asked(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": [1, 10]}, "outside of the vocabulary of 10"),
        ({"ids": [-1]}, "outside of the vocabulary of 10"),
        ({"positions": (1,)}, "0 embeddings for 1 positions"),
        ({"embeds": torch.zeros(1, 3), "positions": (1,)}, r"shape \[1, 3\]; this model takes \[n, 4\]"),
        ({"embeds": torch.zeros(1, 4), "positions": (2,)}, "outside of the prompt"),
        ({"embeds": torch.zeros(2, 4), "positions": (1, 1)}, "two embeddings have one position"),
        ({"embeds": torch.tensor([[0.0, 1.0, float("nan"), 0.0]]), "positions": (1,)}, "not finite"),
        ({"embeds": torch.tensor([[0.0, 1.0, -torch.inf, 0.0]]).half(), "positions": (1,)}, "not finite"),
        ({"places": PLACES[:, :1]}, r"places of shape \[3, 1\]; this prompt takes \[3, 2\]"),
        ({"kinds": KINDS, "open": True}, "kinds need a model of several kinds and a whole prompt"),
        ({"before": torch.zeros(1, 4)}, "flow head"),
    ],
)
def test_mistakes_of_the_caller_are_told_as_such(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as raised:
        check(asked(**fields))
    assert raised.value.request_id == "a"


def test_what_the_user_gave_names_its_field() -> None:
    with pytest.raises(InvalidInputError, match="the prompt is empty"):
        check(asked(ids=[]))
    for token in (10, -1):
        with pytest.raises(InvalidInputError, match=f"names the token {token}; .* from 0 to 9") as raised:
            check(asked(sampling=Sampling(logit_bias=((5, 1.0), (token, 1.0)))))
        assert raised.value.param == "logit_bias"
    with pytest.raises(InvalidInputError, match="names the token 5 twice") as raised:
        check(asked(sampling=Sampling(logit_bias=((5, 1.0), (6, 1.0), (5, 1.0)))))
    assert raised.value.param == "logit_bias"
    with pytest.raises(InvalidInputError, match="max_tokens is 0; an answer has 1 token or more") as raised:
        check(asked(sampling=Sampling(max_tokens=0)))
    assert raised.value.param == "max_tokens"
    check_length("a", 7, 7)
    with pytest.raises(ContextLengthError, match="8 tokens; at most 7 fit") as too_long:
        check_length("a", 8, 7)
    assert too_long.value.param == "messages"


def test_what_an_engine_lacks_is_refused() -> None:
    with pytest.raises(ProtocolError, match="`decode`"):
        check(asked(stop=("x",)), decodes=False)
    with pytest.raises(ProtocolError, match="places need a model of several kinds"):
        check(asked(places=PLACES), knows_kinds=False)
    for fields in ({"places": PLACES}, {"kinds": KINDS}, {"before": torch.zeros(1, 4)}):
        with pytest.raises(ProtocolError):
            refuse_kinds(asked(**fields))
    for text in ({"hidden": "last"}, {"grammar": "start: /a/"}):
        with pytest.raises(ProtocolError, match="an engine of frames"):
            refuse_text(asked(**text))
