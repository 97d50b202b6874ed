"""What the server writes to its log: `key=value` for people, JSON lines for programs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Literal

LogFormat = Literal["text", "json"]


class Fields:
    """A record that is data. As text: `key=value` pairs on one line, `-` for what is not there."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{key}={'-' if value is None else value}" for key, value in self.values.items())


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, and either the record's `Fields` or its message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        match record.args:
            case (Fields() as fields,):
                line |= fields.values
            case _:
                line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # msgspec would refuse half a surrogate pair, as a path may have
