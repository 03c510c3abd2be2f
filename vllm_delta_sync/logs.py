"""Lines of the log: without credentials (``redact``, ``guarded_logger``), not too many (``LogThrottle``), or as JSON.

``DeltaSyncError`` passes its message through ``redact``, which covers status, HTTP answers, ``--json`` and tracebacks.
``guarded_logger`` covers log lines and the tracebacks of third-party errors in them. ``log_as_json`` makes loggers
write one JSON object per line; a line that is about a version has fields of its own, which the caller passes as
``extra=about(…)``.
"""

import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

REMOVED = "[removed]"

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{1,30}://"
_NAMES = (
    r"(?:[\w-]{0,40}?(?:signature(?:provided)?|credential|access[_-]?key(?:[_-]?id)?|api[_-]?key|secret[\w-]{0,20}"
    r"|password|passwd|passphrase|token(?:-\d)?|googleaccessid)|sig)"
)
# A name that ends with "_key" or "Key" is a secret, except our settings that name files, and public keys. Words such as
# "monkey" and a bare "key", which our messages use for keys of objects, are not.
_KEYS = (
    r"[\w-]{0,40}?(?:[_-]key|(?-i:[a-z0-9]Key))(?<!signing_key)(?<!notice_key)(?<!server_key)(?<!public_key)"
    r"(?<!signing-key)(?<!notice-key)(?<!server-key)"
    r"(?<!public-key)(?<!trusted_key)(?<!PublicKey)"
)
# A secret with a slash looks like a path, and a password may contain an @: the last @ of the word ends both.
_USERINFO = re.compile(
    rf"(?P<scheme>{_SCHEME})(?:[^\s/?#]{{0,512}}@|[^\s/?#@:'\"]{{1,256}}:(?!\d{{1,5}}(?:[/?#'\"\s]|$))\S{{0,256}}@)"
)
_QUERY = re.compile(rf"(?P<place>{_SCHEME}[^\s?#]{{0,4096}})(?P<mark>[?#])(?P<rest>\S+)")
_CLOSING = "'\"`)>,.;:"
_VALUE = r"(?P<value>(?<=')[^'\n]{6,}(?=')|(?<=\")[^\"\n]{6,}(?=\")|[^\s&'\",;)<]{6,})"
# As in assignments, JSON, pairs of headers, XML, and options of commands.
_PAIR = re.compile(
    rf"(?i)(?P<name>(?<![\w-])(?:{_NAMES}|{_KEYS}))"
    rf"(?P<sign>['\"]?\s?=\s?['\"]?|['\"]\s?:\s?['\"]?|['\"],\s?b?['\"]|>){_VALUE}"
)
_OPTION = re.compile(rf"(?P<name>--(?:{_NAMES}|{_KEYS}))(?P<sign>\s['\"]?){_VALUE}")
# As in headers and YAML. Prose may follow "token:" or "signature:", but rarely a compound such as "api_token:".
_LINE = re.compile(
    r"(?i)(?P<name>(?<![\w.-])(?:password|passwd|(?:token|secret)(?=\s?:\s?['\"]?[^\s\d]{0,64}\d)"
    rf"|[\w-]{{0,40}}?[_-](?:token|password|passwd|secret)|(?:{_KEYS})))(?P<sign>\s?:\s?['\"]?){_VALUE}"
)
_HEADER = re.compile(
    r"(?i)(?P<name>authorization['\"]?\s?[:=,]\s?b?['\"]?(?:[a-z][\w-]{0,40}+\s)?+|bearer\s|\bx-amz-[\w-]{1,40}:\s"
    r"|\bcookie:\s)"
    r"[^\s'\",;)]{6,}"
)
_KEY_ID = re.compile(
    r"\b(?:A(?:KIA|SIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{20,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|ya29\.[\w-]{20,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?)(?![A-Za-z0-9])"
)
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.S)


def public_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; a bare path unchanged."""
    shown = _USERINFO.sub(r"\g<scheme>", url)
    found = re.match(rf"{_SCHEME}[^?#]*", shown)
    return redact(found[0] if found else shown)


def redact(text: str) -> str:
    """Remove user, password, query and fragment of URLs, values named signature, token, secret and the like, access
    key ids, and private keys."""
    text = _PRIVATE.sub(REMOVED, text)
    text = _USERINFO.sub(r"\g<scheme>", text)
    text = _QUERY.sub(_without_query, text)
    text = _HEADER.sub(rf"\g<name>{REMOVED}", text)
    for pattern in (_PAIR, _LINE, _OPTION):
        text = pattern.sub(rf"\g<name>\g<sign>{REMOVED}", text)
    return _KEY_ID.sub(REMOVED, text)


def guarded_logger(name: str) -> logging.Logger:
    """Return the logger of that name, whose lines go through ``redact``. Child loggers need their own call."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, _Redacting) for known in logger.filters):
        logger.addFilter(_Redacting())
    return logger


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info and record.exc_text is None:
            # Handlers print this text if it is set; otherwise they format the exception themselves.
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def _without_query(found: re.Match[str]) -> str:
    rest = found["rest"]
    return f"{found['place']}{found['mark']}{REMOVED}{rest[len(rest.rstrip(_CLOSING)) :]}"


REPEAT_SECONDS = 60.0
MAX_SUBJECTS = 64
ONCE = math.inf
"""For ``LogThrottle(seconds=)``: log each subject once."""


class LogThrottle:
    """Logs a line about a subject unless one was logged less than ``seconds`` ago. Any thread may use it.

    Within that time it logs at most MAX_SUBJECTS different subjects, so that a flood of them cannot fill the log.
    """

    def __init__(self, logger: logging.Logger, seconds: float = REPEAT_SECONDS) -> None:
        self._logger = logger
        self._seconds = seconds
        self._logged_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_due(self, subject: str) -> bool:
        """Return whether to log a line about a subject now; True counts it as logged."""
        now = time.monotonic()
        with self._lock:
            self._logged_at = {each: at for each, at in self._logged_at.items() if now - at < self._seconds}
            if subject in self._logged_at or len(self._logged_at) >= MAX_SUBJECTS:
                return False
            self._logged_at[subject] = now
            return True

    def warn(self, text: str, subject: str | None = None) -> None:
        """Log a warning if it is due; ``subject``: by default the text."""
        if self.is_due(text if subject is None else subject):
            self._logger.warning("%s", text, stacklevel=2)

    def forget(self, subject: str) -> None:
        """Let the next line about a subject be due at once."""
        with self._lock:
            self._logged_at.pop(subject, None)


def without_numbers(text: str) -> str:
    """Return a subject that is the same for texts that differ only in numbers, such as versions and seconds."""
    return re.sub(r"[0-9]+", "0", text)


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
