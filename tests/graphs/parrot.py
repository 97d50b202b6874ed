"""A graph that the server can serve without weights: it repeats what it is told, and hums it, in two processes."""

from __future__ import annotations

import os
import signal

import anyio
import numpy as np

from omniflow import (
    Actor,
    AudioChunk,
    Chat,
    Emit,
    Generated,
    Graph,
    Stream,
    TextDelta,
    TextPart,
    absent,
    bind,
    one_for_one,
)


class Parrot(Actor):
    """Says the last thing it was told, word by word. `wait` takes 0.5 s, `die` kills its process."""

    def __init__(self, *, prefix: str = "", repeat: int = 1) -> None:
        self.prefix = prefix
        self.repeat = repeat

    async def run(self, chat: Chat, text: Emit[TextDelta]) -> Generated:
        (part,) = chat.messages[-1].parts
        assert isinstance(part, TextPart)
        words = (self.prefix + part.text).split() * self.repeat
        for word in words:
            if word == "wait":
                await anyio.sleep(0.5)
            if word == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            await text.send(TextDelta(word + " "))
        return Generated("stop", len(words), len(words))


class Hum(Actor):
    """0.1 s of sound a character."""

    heavy = True

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for delta in texts:
            for _ in delta.text:
                await audio.send(AudioChunk(np.full(2400, 0.25, np.float32), 24000))


class Loud(Parrot):
    """Another parrot, for another profile."""

    heavy = True


graph = Graph("parrot")
parrot = graph.stage("parrot", Parrot)
hum = graph.stage("hum", Hum)
graph.stream(parrot["text"], hum)
graph.input(chat=parrot, speech=hum)
graph.output(text=parrot["text"], usage=parrot["result"], audio=hum)
graph.profile("quiet", "says what it hears", parrot=bind(Parrot), hum=bind(Hum))
graph.profile(
    "loud", "two processes", parrot=bind(Loud, prefix="HEY ", restart=one_for_one(max_restarts=1, backoff_s=0.01))
)
graph.profile("mute", "text only", hum=absent("this parrot cannot hum"))
