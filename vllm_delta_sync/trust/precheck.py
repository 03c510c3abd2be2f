"""``precheck_signature`` checks a large document's signature before it is parsed, so that junk costs little time."""

import re
from itertools import islice

from vllm_delta_sync.errors import FormatError, SignatureError
from vllm_delta_sync.format.manifest import Signature
from vllm_delta_sync.trust.keyring import Keyring, not_signed_error

PRECHECK_BYTES = 8192
"""Documents below this size are parsed without a precheck: parsing gives better error messages."""
_SIGNATURES = 8
_MEMBER = re.compile(rb'"signature":\{"key":"([0-9a-f]{64})","value":"([0-9a-f]{128})"\}')
_CONTROL = re.compile(rb"[\x00-\x1f]")


def precheck_signature(data: bytes, kind: str, keyring: Keyring, allowed: frozenset[str], what: str) -> None:
    """Refuse bytes that no key in ``allowed`` signed as a document of that kind, without parsing them.

    A canonical document is the signed bytes with a signature member inserted, which is therefore cut out of the bytes.
    Passing proves nothing: the signature is checked again after parsing.

    Args:
        kind: ``Document.KIND``.
        allowed: public keys, including retired and revoked ones, which may have been valid for this document.

    Raises:
        SignatureError: not signed, signed by another key, or changed since. FormatError: not a canonical JSON object.
    """
    if not data.startswith(b"{") or not data.endswith(b"}") or _CONTROL.search(data) is not None:
        raise FormatError(f"{what} is not a canonical JSON object: it is damaged, or no publisher wrote it")
    first: SignatureError | None = None
    # A member that this release does not know may hold a signature too.
    for found in islice(_MEMBER.finditer(data), _SIGNATURES):
        signature = Signature(key=found[1].decode(), value=found[2].decode())
        try:
            keyring.check_bytes(kind, _without(data, *found.span()), signature, what, allowed)
            return
        except SignatureError as error:
            first = first or error
    raise first or not_signed_error(what)


def _without(data: bytes, start: int, end: int) -> bytes:
    """Cut a member out of an object's bytes, with the comma that separates it from its neighbour."""
    if data[end : end + 1] == b",":
        end += 1
    elif data[start - 1 : start] == b",":
        start -= 1
    return data[:start] + data[end:]
