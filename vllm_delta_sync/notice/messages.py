"""``Notice``: the announcement of a version, and its encoding. ``LastValues``: the last notice of each run."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from pydantic import ValidationError

from vllm_delta_sync.errors import FormatError, SignatureError
from vllm_delta_sync.format.canonical_json import dump_canonical, load_canonical
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.format.manifest import Signature
from vllm_delta_sync.trust.keyring import Keyring

KIND = "notice"
"""The document kind that signatures of notices cover, besides the notice itself."""
MAX_TOPIC_BYTES = 64
MAX_NOTICE_BYTES = 4096
"""Messages above this size are ignored."""
MAX_CHECKS = 32
"""Signatures checked per batch of messages, so that a flood cannot block a receiver."""
FIELDS = {"manifest", "run", "version"}


@dataclass(frozen=True, slots=True)
class Notice:
    """Version ``version`` of ``run`` is durable; ``manifest`` is the SHA-256 of its manifest, in hex."""

    run: str
    version: int
    manifest: str


@dataclass(frozen=True, slots=True)
class Message:
    """A received notice. ``data``: the bytes that ``signature`` covers."""

    notice: Notice
    data: bytes
    signature: Signature | None


def encode(notice: Notice, keyring: Keyring | None) -> list[bytes]:
    """Return the two frames of a notice: topic and content, signed if the keyring has a signing key."""
    value = asdict(notice)
    data = dump_canonical(value)
    signature = None if keyring is None else keyring.sign_bytes(KIND, data)
    if signature is not None:
        data = dump_canonical({**value, "signature": signature.model_dump()})
    return [notice.run.encode(), data]


def parse(frames: list[bytes], run: str) -> Message:
    """Parse a message with the topic of a run; raises FormatError if it is not a notice of that run."""
    if len(frames) != 2:
        raise FormatError(f"notice has {len(frames)} frames, not 2")
    value = load_canonical(frames[1], "notice", MAX_NOTICE_BYTES)
    if not isinstance(value, dict) or value.keys() - {"signature"} != FIELDS:
        raise FormatError("notice is not an object of manifest, run and version")
    version, manifest = value["version"], value["manifest"]
    if value["run"] != run or not isinstance(manifest, str):
        raise FormatError("notice names another run than its topic, or no manifest")
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise FormatError(f"notice has version {version!r}; it must be an integer from 0 to {MAX_VERSION}")
    notice = Notice(run, version, manifest)
    if "signature" not in value:
        return Message(notice, frames[1], None)
    try:
        signature = Signature.model_validate(value["signature"])
    except ValidationError as error:
        raise FormatError("notice has a signature that is not an object of key and value in hex") from error
    return Message(notice, dump_canonical(asdict(notice)), signature)


class NoticeVerifier:
    """Picks the newest notice with a valid signature; without trusted keys, the newest notice.

    Attributes:
        rejected: number of rejected notices: unsigned, wrongly signed, or signed by a key that is not in use.
    """

    def __init__(self, keyring: Keyring | None, allowed: Callable[[], frozenset[str]] | None) -> None:
        """Make a verifier. Args: allowed: keys in use now; None means the trusted keys."""
        self._keyring = keyring if keyring is not None and keyring.checks_signatures else None
        self._allowed = allowed
        self._proven: Message | None = None
        self.rejected = 0

    def newest(self, messages: Iterable[Message]) -> Notice | None:
        """Return the newest valid notice; messages beyond MAX_CHECKS signatures count as rejected."""
        keyring = self._keyring
        ordered = sorted(messages, key=lambda message: message.notice.version, reverse=True)
        if keyring is None:
            return ordered[0].notice if ordered else None
        allowed = keyring.trusted if self._allowed is None else self._allowed()
        checks = 0
        for index, message in enumerate(ordered):
            if message.signature is None or message.signature.key not in allowed:
                self.rejected += 1
                continue
            if message != self._proven:
                if checks == MAX_CHECKS:
                    self.rejected += len(ordered) - index
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


REPEAT_SECONDS = 1.0
SOONEST_SECONDS = 0.02
"""Minimum time between repetitions, so that a storm of new subscribers shares them."""


@dataclass(slots=True)
class _LastEntry:
    frames: list[bytes]
    due: float
    sent: float


class LastValues:
    """The last message of each topic, and when to send it again.

    It is sent again to new subscribers, and to all every ``repeat_seconds``.

    Args:
        topics: maximum number of topics; beyond it, the topic updated least recently is dropped.
    """

    def __init__(self, topics: int, repeat_seconds: float) -> None:
        self._topics = topics
        self._repeat = repeat_seconds
        self._entries: OrderedDict[bytes, _LastEntry] = OrderedDict()

    def put(self, frames: list[bytes]) -> None:
        """Keep a message that is being sent now; its first frame is the topic."""
        now = time.monotonic()
        self._entries[frames[0]] = _LastEntry(frames, now + self._repeat, now)
        self._entries.move_to_end(frames[0])
        if len(self._entries) > self._topics:
            self._entries.popitem(last=False)

    def resend_soon(self, prefix: bytes) -> None:
        """Send the messages of topics with this prefix again soon, because of a new subscriber."""
        for topic, entry in self._entries.items():
            if topic.startswith(prefix):
                entry.due = min(entry.due, entry.sent + SOONEST_SECONDS)

    def due(self) -> list[list[bytes]]:
        """Return the messages to send now, and count them as sent."""
        now = time.monotonic()
        found = []
        for entry in self._entries.values():
            if entry.due <= now:
                entry.due, entry.sent = now + self._repeat, now
                found.append(entry.frames)
        return found

    def next_at(self) -> float:
        """Return when the next message is due, by the monotonic clock; infinity if there is none."""
        return min((entry.due for entry in self._entries.values()), default=float("inf"))
