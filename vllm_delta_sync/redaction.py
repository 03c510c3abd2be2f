"""``redact`` removes credentials from text; ``guarded_logger`` applies it to log lines.

``DeltaSyncError`` passes its message through ``redact``, which covers status, HTTP answers, ``--json`` and tracebacks.
``guarded_logger`` covers log lines and the tracebacks of third-party errors in them.
"""

import logging
import re

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
