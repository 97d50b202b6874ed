"""How a model wants to read a conversation: its chat template, from which no text can break out, and its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.checkpoint import language_part, read_json
from actors.tokenizer import encode_texts, load_tokenizer
from actors.tool_prompt import Turn, arguments_of, described, in_plain_turns
from omniflow.errors import InvalidInputError, WeightsError
from omniflow.media import Tool, ToolCall

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

PLAIN = re.compile(r"[\w\s.,:;!?()'/+*=%&#@$-]*")
"""Text that cannot be part of a control token, all of which have one of the other characters."""


class ChatFormat:
    """How one model wants to read a conversation: its chat template, its tokenizer, and its `context`, in tokens.

    Raises WeightsError where `folder` lacks one of these, or it is broken.
    """

    def __init__(self, folder: Path) -> None:
        self.context = _context(folder)
        self._names = _token_names(folder)
        self._template, self._knows_tools = _template(folder)
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.encode_special_tokens = True  # as text, wherever it meets them
        known = self._tokenizer.get_added_tokens_decoder()
        self._control = {token.content: id for id, token in known.items() if token.special}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[int]:
        """Token ids of a conversation as the template arranges it, up to where the answer begins.

        Raises InvalidInputError where the template refuses it.
        """
        texts, controls = self._between_controls(turns, tools)
        encoded = encode_texts(self._tokenizer, texts)
        ids = list(encoded[0])
        for control, text_ids in zip(controls, encoded[1:], strict=True):
            ids += [control, *text_ids]
        return ids

    def _between_controls(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> tuple[list[str], list[int]]:
        """The texts before, between and after the control tokens that the template wrote, and these tokens."""
        marks = Marks(self._control_pattern)
        rendered = self._render(turns, tools, marks)
        texts, controls = [""], list[int]()
        for number, part in enumerate(Marks.PATTERN.split(rendered)):
            if number % 2:  # what people wrote, at its mark
                texts[-1] += marks.text_at(part)
                continue
            for piece in self._control_pattern.split(part):
                if piece in self._control:
                    controls.append(self._control[piece])
                    texts.append("")
                else:
                    texts[-1] += piece
        return texts, controls

    def _render(self, turns: Sequence[Turn], tools: Sequence[Tool], marks: Marks) -> str:
        """The conversation with marks instead of its texts, so that no text can pass for the template's."""
        import jinja2

        if not self._knows_tools:
            turns, tools = in_plain_turns(turns, tools), ()
        messages = [_message(turn, marks) for turn in turns]
        shown = [marks.within(described(tool)) for tool in tools] or None
        try:
            return self._template.render(messages=messages, tools=shown, add_generation_prompt=True, **self._names)
        except jinja2.TemplateError as error:
            raise InvalidInputError(f"the model's chat template refuses this: {error}", param="messages") from error

    def count(self, texts: list[str]) -> int:
        """How many tokens `texts` have, each by itself."""
        return sum(map(len, encode_texts(self._tokenizer, texts)))


class Marks:
    """Stands in for texts while a template runs: private-use characters around the text's number.

    Equal texts have equal marks, so that templates may compare them. In JSON, a mark stands for the escaped text.
    """

    PATTERN = re.compile("([\ue000\ue002]\\d+)\ue001")

    def __init__(self, control: re.Pattern[str]) -> None:
        self._control = control
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """The mark of `text`."""
        number = self._numbers.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
        return f"\ue000{number}\ue001"

    def within(self, value: Any) -> Any:
        """A JSON value, whose texts are marks: all but those that no template could mistake for its own.

        Templates look at some of them (the type of a parameter), so not all can be hidden.
        """
        match value:
            case str():
                plain = PLAIN.fullmatch(value) and not self._control.search(value)
                return value if plain else self.mark(value)
            case list():
                return [self.within(each) for each in value]
            case dict():
                return {self.within(key): self.within(each) for key, each in value.items()}
        return value

    def text_at(self, mark: str) -> str:
        """The text of a mark, as `PATTERN` finds it."""
        text = self._texts[int(mark[1:])]
        return json.dumps(text, ensure_ascii=False)[1:-1] if mark[0] == "\ue002" else text


def _message(turn: Turn, marks: Marks) -> dict[str, Any]:
    """A turn as chat templates get it, by the convention of Hugging Face transformers."""
    message: dict[str, Any] = {"role": turn.role, "content": marks.mark(turn.text)}
    if turn.calls:
        message["content"] = marks.mark(turn.text) if turn.text else ""  # templates ask whether there is any
        message["tool_calls"] = [_call(call, marks) for call in turn.calls]
    if turn.call_id is not None:
        message["tool_call_id"] = marks.within(turn.call_id)
    return message


def _call(call: ToolCall, marks: Marks) -> dict[str, Any]:
    function = {"name": marks.within(call.name), "arguments": marks.within(arguments_of(call))}
    return {"id": marks.within(call.id), "type": "function", "function": function}


def _template(folder: Path) -> tuple[jinja2.Template, bool]:
    """The chat template, and whether it has a place for tools. Raises WeightsError where there is none that works."""
    import jinja2.meta

    file = folder / "chat_template.jinja"
    if not file.exists():
        raise WeightsError(f"{folder} has no chat_template.jinja; a model that chats needs one")
    environment = _environment()
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(file.read_text()))
        return environment.from_string(file.read_text()), "tools" in names
    except jinja2.TemplateSyntaxError as error:
        raise WeightsError(f"{file}, line {error.lineno}: {error.message}") from error


def _environment() -> jinja2.Environment:
    """What templates may use, by the convention of Hugging Face transformers."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` tells trainers what the model has written; here it is the text within."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, it escapes nothing for HTML. The marks of texts become those of escaped texts."""
    import jinja2

    if isinstance(value, jinja2.Undefined):
        raise jinja2.TemplateError("a value that is missing cannot be written as JSON")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace("\ue000", "\ue002")


def _context(folder: Path) -> int:
    """Tokens that the model can see. Raises WeightsError where config.json does not say."""
    context = language_part(read_json(folder / "config.json")).get("max_position_embeddings")
    if not isinstance(context, int):
        raise WeightsError(f"{folder}: config.json names no max_position_embeddings, which bounds a conversation")
    return context


def _token_names(folder: Path) -> dict[str, str]:
    """`bos_token` and its like, which templates may use."""
    config = read_json(folder / "tokenizer_config.json")
    return {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
