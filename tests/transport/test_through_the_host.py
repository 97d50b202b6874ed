"""Tensors on GPUs that go through the host: nobody waits for a GPU in the event loop, where the death of the peer that
it waits for would be heard. Doubles stand in for what a GPU would do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from omniflow.errors import ProtocolError
from omniflow.transport import codec
from tests.contract.ends import Ends

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def copied_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that copy tensors to the host, while a GPU is at work."""
    threads: list[int] = []
    whole = codec._whole
    monkeypatch.setattr(codec, "_is_computed_on", lambda tensor: True)

    def copy(tensor: Any) -> Any:
        threads.append(threading.get_ident())
        return whole(tensor)

    monkeypatch.setattr(codec, "_whole", copy)
    return threads


async def test_what_is_still_computed_is_waited_for_in_a_thread(copied_by: list[int]) -> None:
    ends = Ends("arrow_shm")
    ends.types[1] = list[torch.Tensor]  # type: ignore[name-defined]
    value = [torch.arange(9), torch.arange(50_000)]
    pending = ends.a.send_item(1, 7, 3, value)
    assert pending is not None and copied_by == []
    await pending
    arrived = await ends.at_b.item()
    assert arrived.seq == 3 and all(map(torch.equal, arrived.value, value))
    assert len(copied_by) == 2 and threading.get_ident() not in copied_by
    del arrived
    await ends.returned()
    ends.close()


async def test_a_value_that_cannot_travel_is_refused_from_there_too(copied_by: list[int]) -> None:
    ends = Ends("arrow_shm")
    pending = ends.a.send_item(1, 7, 0, [torch.arange(9), object()])
    assert pending is not None
    with pytest.raises(ProtocolError, match="of type object cannot travel"):
        await pending
    ends.close()


async def test_a_link_that_is_closed_meanwhile_sends_nothing(copied_by: list[int]) -> None:
    ends = Ends("arrow_shm")
    pending = ends.a.send_item(1, 7, 0, torch.arange(50_000))
    assert pending is not None
    ends.close()
    await pending
    assert not ends.at_b.items


def test_what_came_through_the_host_is_copied_by_a_stream_that_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Tensor:
        device = "cuda:0"

        def to(self, home: str) -> Tensor:
            calls.append(f"to {home}")
            return self

        def record_stream(self, stream: str) -> None:
            calls.append(f"used by {stream}")

    @contextlib.contextmanager
    def stream(chosen: str) -> Iterator[None]:
        calls.append(f"by {chosen}")
        yield
        calls.append("by the default one again")

    monkeypatch.setattr(codec, "_copies", lambda home: "its own")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default one of {device}")
    tensor: Any = Tensor()
    assert codec._brought(tensor, "cuda") is tensor
    assert calls == ["by its own", "to cuda", "by the default one again", "used by the default one of cuda:0"]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    here = torch.arange(3)
    assert not codec._is_computed_on(here)
    assert torch.equal(codec._brought(here, "cpu"), here)
