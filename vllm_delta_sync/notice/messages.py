"""What a notice says, its bytes, and who vouches for it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from pydantic import ValidationError

from vllm_delta_sync.errors import FormatError, SignatureError
from vllm_delta_sync.format.canonical_json import dump_canonical, load_canonical
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.format.manifest import Signature
from vllm_delta_sync.trust.keyring import Keyring

KIND = "notice"
"""What signatures of notices are over, beside the notice itself."""
MAX_TOPIC_BYTES = 64
MAX_NOTICE_BYTES = 4096
"""Larger messages are ignored."""
MAX_CHECKS = 32
"""Signatures checked among the messages that were waiting, so that a flood cannot hold a receiver."""
FIELDS = {"manifest", "run", "version"}


@dataclass(frozen=True, slots=True)
class Notice:
    """Version ``version`` of ``run`` is durable; ``manifest`` is the SHA-256 of its manifest, in hex."""

    run: str
    version: int
    manifest: str


@dataclass(frozen=True, slots=True)
class Message:
    """A notice as it came. ``data``: the bytes that ``signature`` is over."""

    notice: Notice
    data: bytes
    signature: Signature | None


def encode(notice: Notice, keyring: Keyring | None) -> list[bytes]:
    """The two frames of a notice, signed if the keyring has a signing key."""
    value = asdict(notice)
    data = dump_canonical(value)
    signature = None if keyring is None else keyring.sign_bytes(KIND, data)
    if signature is not None:
        data = dump_canonical({**value, "signature": signature.model_dump()})
    return [notice.run.encode(), data]


def parse(frames: list[bytes], run: str) -> Message:
    """Read a message with the topic of a run.

    Raises:
        FormatError: it is no notice of that run.
    """
    if len(frames) != 2:
        raise FormatError(f"notice has {len(frames)} frames, not 2")
    value = load_canonical(frames[1], "notice", MAX_NOTICE_BYTES)
    if not isinstance(value, dict) or value.keys() - {"signature"} != FIELDS:
        raise FormatError("notice is not an object of manifest, run and version")
    version, manifest = value["version"], value["manifest"]
    if value["run"] != run or not isinstance(manifest, str):
        raise FormatError("notice names another run than its topic, or no manifest")
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise FormatError(f"notice has version {version!r}, which is no version")
    notice = Notice(run, version, manifest)
    if "signature" not in value:
        return Message(notice, frames[1], None)
    try:
        signature = Signature.model_validate(value["signature"])
    except ValidationError as error:
        raise FormatError("notice has a signature that is not an object of key and value in hex") from error
    return Message(notice, dump_canonical(asdict(notice)), signature)


class NoticeVerifier:
    """Picks the newest notice that may be believed; any, without a keyring that has trusted keys.

    Attributes:
        rejected: how many were not believed: unsigned, wrongly signed, or by a key that is not in use.
    """

    def __init__(self, keyring: Keyring | None, allowed: Callable[[], frozenset[str]] | None) -> None:
        """Args: allowed: keys in use now; None: the trusted keys."""
        self._keyring = keyring if keyring is not None and keyring.checks_signatures else None
        self._allowed = allowed
        self._proven: Message | None = None
        self.rejected = 0

    def newest(self, messages: Iterable[Message]) -> Notice | None:
        """The newest of some messages; what cannot be checked in a bounded time counts as rejected."""
        keyring = self._keyring
        ordered = sorted(messages, key=lambda message: message.notice.version, reverse=True)
        if keyring is None:
            return ordered[0].notice if ordered else None
        allowed = keyring.trusted if self._allowed is None else self._allowed()
        checks = 0
        for place, message in enumerate(ordered):
            if message.signature is None or message.signature.key not in allowed:
                self.rejected += 1
                continue
            if message != self._proven:
                if checks == MAX_CHECKS:
                    self.rejected += len(ordered) - place
                    break
                checks += 1
                try:
                    keyring.check_bytes(KIND, message.data, message.signature, "notice", allowed)
                except SignatureError:
                    self.rejected += 1
                    continue
                self._proven = message
            return message.notice
        return None
