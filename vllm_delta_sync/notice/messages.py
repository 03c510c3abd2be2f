"""``Notice`` announces a version; ``LastValues`` keeps the last one of each run."""

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from vllm_delta_sync.errors import FormatError, SignatureError
from vllm_delta_sync.format.base_document import Signature, dump_canonical, load_canonical
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.trust.keyring import Keyring

KIND = "notice"
"""The document kind that a signature covers, besides the message itself."""
MAX_TOPIC_BYTES = 64
MAX_NOTICE_BYTES = 4096
"""Messages above this size are ignored."""
MAX_CHECKS = 32
"""Signatures checked per batch of messages, so that a flood cannot block a receiver."""


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Notice:
    """Version ``version`` of ``run`` is durable; ``manifest`` is the SHA-256 of its manifest, in hex."""

    run: str
    version: Annotated[int, Field(ge=0, le=MAX_VERSION, strict=True)]
    manifest: str


@plain_dataclass(frozen=True, slots=True)
class Message:
    """A received message. ``data``: the bytes that ``signature`` covers."""

    content: Notice
    data: bytes
    signature: Signature | None


def encode(notice: Notice, keyring: Keyring | None) -> list[bytes]:
    """Return the two frames of a message: topic and content, signed if the keyring has a signing key."""
    value = asdict(notice)
    data = dump_canonical(value)
    signature = None if keyring is None else keyring.sign_bytes(KIND, data)
    if signature is not None:
        data = dump_canonical({**value, "signature": signature.model_dump()})
    return [notice.run.encode(), data]


def parse(frames: list[bytes], run: str) -> Message:
    """Parse a message about a run; raises FormatError if it is no notice of that run."""
    if len(frames) != 2:
        raise FormatError(f"notice has {len(frames)} frames, not 2")
    value = load_canonical(frames[1], "notice", MAX_NOTICE_BYTES)
    if not isinstance(value, dict):
        raise FormatError("notice is not an object")
    try:
        signature = Signature.model_validate(value.pop("signature")) if "signature" in value else None
        content = Notice(**value)
    except (ValidationError, TypeError) as error:
        raise FormatError(f"notice is malformed: {str(error)[:200]}") from error
    if content.run != run:
        raise FormatError("notice names another run than its topic")
    return Message(content, frames[1] if signature is None else dump_canonical(value), signature)


class NoticeVerifier:
    """Picks the newest notice with a valid signature; any if there are no trusted keys.

    Attributes:
        rejected: number of rejected messages: unsigned, wrongly signed, or signed by a key that is not trusted.
    """

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring if keyring is not None and keyring.checks_signatures else None
        self._proven: Message | None = None
        self.rejected = 0

    def newest(self, messages: Iterable[Message]) -> Notice | None:
        """Return the newest valid notice; messages beyond MAX_CHECKS signatures count as rejected."""
        ordered = sorted(messages, key=lambda message: message.content.version, reverse=True)
        if self._keyring is None:
            return ordered[0].content if ordered else None
        checks = 0
        for index, message in enumerate(ordered):
            if message.signature is None or message.signature.key not in self._keyring.trusted:
                self.rejected += 1
                continue
            if message != self._proven:
                if checks == MAX_CHECKS:
                    self.rejected += len(ordered) - index
                    break
                checks += 1
                try:
                    self._keyring.check_bytes(KIND, message.data, message.signature, "notice")
                except SignatureError:
                    self.rejected += 1
                    continue
                self._proven = message
            return message.content
        return None


REPEAT_SECONDS = 1.0


class LastValues:
    """The last message of each topic, which is sent again every ``repeat_seconds``, also for new subscribers.

    Args:
        topics: maximum number of topics; beyond it, the topic updated least recently is dropped.
    """

    def __init__(self, topics: int, repeat_seconds: float) -> None:
        self._topics = topics
        self._repeat = repeat_seconds
        # By topic: the message, and when it is due.
        self._entries: OrderedDict[bytes, tuple[list[bytes], float]] = OrderedDict()

    def put(self, frames: list[bytes]) -> None:
        """Keep a message that is being sent now; its first frame is the topic."""
        self._entries[frames[0]] = frames, time.monotonic() + self._repeat
        self._entries.move_to_end(frames[0])
        if len(self._entries) > self._topics:
            self._entries.popitem(last=False)

    def due(self) -> list[list[bytes]]:
        """Return the messages to send now, and count them as sent."""
        now = time.monotonic()
        found = [frames for frames, due in self._entries.values() if due <= now]
        for frames in found:
            self._entries[frames[0]] = frames, now + self._repeat
        return found

    def next_at(self) -> float:
        """Return when the next message is due, by the monotonic clock; infinity if there is none."""
        return min((due for _, due in self._entries.values()), default=float("inf"))
