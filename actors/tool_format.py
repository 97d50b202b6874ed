"""How a family of models writes the call of a tool into its answer."""

from __future__ import annotations

import msgspec


class ToolFormat(msgspec.Struct, frozen=True):
    """One call is `begin`, a JSON object {"name": NAME, "arguments": {...}}, `end`; blanks around it mean nothing.

    A model held to a grammar writes `opening(name)`, the arguments, `closing`, and a line break between two calls:

        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Paris"}}
        </tool_call>

    Left to itself it may write other blanks, or the members the other way round; a reader takes what JSON takes.
    """

    begin: str
    end: str

    def opening(self, name: str) -> str:
        """A call of `name`, up to where its arguments begin."""
        return f'{self.begin}\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": '

    @property
    def closing(self) -> str:
        """What follows the arguments."""
        return f"}}\n{self.end}"


HERMES = ToolFormat("<tool_call>", "</tool_call>")
"""Hermes, Qwen2.5, Qwen3, SmolLM2, SmolLM3 and many others."""
