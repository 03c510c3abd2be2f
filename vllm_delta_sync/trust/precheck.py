"""What is found out about a large document before it is parsed, so that junk costs little time."""

import re
from itertools import islice

from vllm_delta_sync.errors import FormatError, SignatureError
from vllm_delta_sync.format.manifest import Signature
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import check_signature

PRECHECK_BYTES = 8192
"""Smaller documents are parsed at once: what is wrong with them can be said better then."""
_SIGNATURES = 8
_MEMBER = re.compile(rb'"signature":\{"key":"([0-9a-f]{64})","value":"([0-9a-f]{128})"\}')
_CONTROL = re.compile(rb"[\x00-\x1f]")


def precheck_signature(data: bytes, kind: str, keyring: Keyring, allowed: frozenset[str], what: str) -> None:
    """Refuse bytes that no key of ``allowed`` has signed as a document of that kind, without parsing them.

    A canonical document is what was signed and one member more, so the member is cut out of the bytes. What passes is
    not proven to be good: whoever parses it checks its signature again.

    Args:
        kind: ``Document.KIND``. allowed: public keys, also those whose word may not hold for this document any more.

    Raises:
        SignatureError: not signed, by another key, or changed since. FormatError: surely no canonical JSON object.
    """
    if not data.startswith(b"{") or not data.endswith(b"}") or _CONTROL.search(data) is not None:
        raise FormatError(f"{what} is not a canonical JSON object: its bytes are damaged, or it is none of a publisher")
    first: SignatureError | None = None
    # A member that this release does not know may hold a signature too.
    for found in islice(_MEMBER.finditer(data), _SIGNATURES):
        signature = Signature(key=found[1].decode(), value=found[2].decode())
        try:
            keyring.check_bytes(kind, _without(data, *found.span()), signature, what, allowed)
            return
        except SignatureError as error:
            first = first or error
    if first is not None:
        raise first
    check_signature(None, b"", what)


def _without(data: bytes, start: int, end: int) -> bytes:
    """An object's bytes without the member that lies there, and the comma that parted it from another."""
    if data[end : end + 1] == b",":
        end += 1
    elif data[start - 1 : start] == b",":
        start -= 1
    return data[:start] + data[end:]
