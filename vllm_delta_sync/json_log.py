"""``log_as_json`` makes loggers write one JSON object per line; ``JsonFormatter`` writes it.

A line that is about a version has fields of its own, which the caller passes as ``extra=about(…)``.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from vllm_delta_sync.redaction import redact

_FIELDS = "delta_sync_fields"
OTHER_EVENT = "log"
"""``event`` of lines without fields of their own."""


def about(
    event: str,
    *,
    version: int,
    step: int,
    run: str,
    payload_bytes: int,
    changed: int,
    timings_ms: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    """Return ``extra`` of a log line about a version.

    Args:
        event: ``served``, ``rolled_back``, ``repaired`` or ``published``.
        payload_bytes, changed: of the objects and elements that were read or written for it; 0 if there were none.
        timings_ms: duration of each phase.
    """
    timings = {phase: round(value, 3) for phase, value in timings_ms.items()}
    fields = {"event": event, "version": version, "step": step, "run": run}
    return {_FIELDS: {**fields, "bytes": payload_bytes, "changed": changed, "timings_ms": timings}}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: ``time`` (UTC), ``level``, ``logger``, ``event``, fields, ``message``.

    A traceback is ``exception``. Credentials are removed, also where the logger does not do it.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": OTHER_EVENT,
            **getattr(record, _FIELDS, {}),
            "message": redact(record.getMessage()),
        }
        if record.exc_info and record.exc_text is None:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["exception"] = redact(record.exc_text)
        return json.dumps(line)


def log_as_json(*names: str, stream: TextIO | None = None, level: int = logging.NOTSET) -> None:
    """Let these loggers and their children write JSON and pass nothing on; calling it again changes nothing.

    Args:
        stream: where lines go; default: standard error. level: of the loggers that have none of their own.
    """
    for name in names:
        logger = logging.getLogger(name)
        if any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers):
            continue
        handler = logging.StreamHandler(sys.stderr if stream is None else stream)
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(level)
