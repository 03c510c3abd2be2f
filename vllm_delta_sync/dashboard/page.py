"""``live_page`` and ``report_page`` return ``page.html`` with its Content-Security-Policy.

The policy allows the page's own script and style by their digests and nothing else: no other script, no markup from
text (Trusted Types), no other host, no frame around it.
"""

import base64
import functools
import hashlib
import json
import re
from importlib import resources
from typing import Any

_BLOCK = re.compile(r"<(style|script)>(.*?)</\1>", re.S)
_DOCUMENT = '<script type="application/json" id="document">null</script>'
_POLICY = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
# HTML ends a script at "</script", and JSON in ASCII needs none of these characters. Without them a name from a bucket
# is harmless even in a page that embeds our JSON unescaped.
_ESCAPED = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\x7f"})


@functools.cache
def _template() -> str:
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


@functools.cache
def policy(live: bool = True) -> str:
    """Return the Content-Security-Policy. Args: live: the page asks its own server, and a header has the policy."""
    digests: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _BLOCK.findall(_template()):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    parts = [
        "default-src 'none'",
        f"style-src {' '.join(digests['style'])}",
        f"script-src {' '.join(digests['script'])}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    # Browsers ignore frame-ancestors in a meta element.
    return "; ".join([*parts, "connect-src 'self'", "frame-ancestors 'none'"] if live else parts)


@functools.cache
def live_page() -> bytes:
    """Return the page that asks ``overview`` beside it for its document; send ``page_headers`` with it."""
    return _template().replace(_POLICY, "").encode()


def page_headers() -> dict[str, str]:
    """Return the HTTP headers of the live page."""
    return {
        "content-security-policy": policy(),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
    }


def harmless_json(content: Any) -> bytes:
    """Return JSON in ASCII, without control characters and those that begin markup."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_ESCAPED).encode()


def report_page(overview: dict[str, Any]) -> bytes:
    """Return one HTML file that shows a document, without a server."""
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy(live=False)}">'
    data = _DOCUMENT.replace("null", harmless_json(overview).decode())
    return _template().replace(_POLICY, meta).replace(_DOCUMENT, data).encode()
