"""``StandingOrderStore`` keeps the target and the hold that an operator set at run time across restarts.

Each configured run URL (and ``receiver_id``) has one small file, written before the request is answered. A damaged file
means that there was an order. The server then holds the version it starts with until the next order, because the lost
order may have been meant to avoid the newest version.
"""

import fcntl
import os
import re
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_sync.bucket import open_bucket, scheme_of, store_of
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import DeltaSyncError, SettingsError, UsageError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.settings import TARGET, Settings

MAX_ORDER_BYTES = 16 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class StandingOrder(BaseModel):
    """An operator's order.

    Attributes:
        setting: the setting ``target`` when the order was given; if it has changed since, the order is dropped.
        target, bucket: chosen at run time; None means as configured. The bucket lies beside the configured one.
        holding: whether new versions are ignored. run, version: what is held; None if no version was served yet.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    format: Literal[1] = 1
    setting: str
    target: Annotated[str, Field(pattern=TARGET)] | None = None
    bucket: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    holding: bool = False
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the order changes nothing."""
        return self.target is None and self.bucket is None and not self.holding

    def __str__(self) -> str:
        parts = [] if self.target is None else [f"target {self.target}"]
        parts += [] if self.bucket is None else ["another run"]
        if self.holding:
            parts.append("hold" if self.version is None else f"hold at version {self.version}")
        return ", ".join(parts) or "none"


class StandingOrderStore:
    """The file with a server's standing order. If it cannot be written, a warning is logged.

    Attributes:
        path: the file; None if there is no usable folder.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock: TextIO | None = None
        self._saved: StandingOrder | None = None
        self.path: Path | None = None
        self._problem = ""
        try:
            name = open_bucket(settings.bucket, settings.store()).url
            if settings.receiver_id is not None:
                name = f"{name}\n{settings.receiver_id}"
            self.path = settings.state_folder() / f"{sha256(name.encode()).hexdigest()[:32]}.order"
        except SettingsError as error:
            self._problem = error.message

    def load(self) -> StandingOrder | None:
        """Return the stored order, or None. If the file cannot be read: an order that holds, without a version."""
        if self.path is None or not os.path.lexists(self.path):
            return None
        unread = StandingOrder(setting=self._settings.target, holding=True)
        try:
            if not self._acquire():
                logger.warning("the standing order is ignored: %s", self._problem)
                return None
            self._saved = self.parse(_read(self.path))
        except (OSError, ValueError, DeltaSyncError) as error:
            reason = error.strerror if isinstance(error, OSError) else _first_line(error)
            logger.warning(
                "the standing order in %r cannot be read (%s), so the version that it holds is unknown: this server "
                "holds the version it starts with. POST /delta_sync/release to follow, or give another order",
                str(self.path), reason,
            )  # fmt: skip
            return unread
        if self._saved.setting != self._settings.target:
            logger.warning(
                "the setting target is %s, and was %s when the standing order (%s) was given: the setting wins, and "
                "the order is dropped",
                self._settings.target, self._saved.setting, self._saved,
            )  # fmt: skip
            self.save(StandingOrder(setting=self._settings.target))
            return None
        logger.info("standing order: %s", self._saved)
        return self._saved

    def save(self, order: StandingOrder) -> None:
        """Store an order durably; an empty order removes the file."""
        if order == self._saved or (self._saved is None and order.is_empty and not self._is_there()):
            return
        try:
            if self.path is not None and self._acquire():
                if order.is_empty:
                    _remove(self.path)
                else:
                    _write(self.path, order.model_dump_json())
                self._saved = None if order.is_empty else order
                return
        except OSError as error:
            self._problem = f"{str(self.path)!r} cannot be written: {error.strerror}"
        logger.warning(
            "the standing order (%s) is in force, but will not survive a restart: %s; set state_dir to a directory "
            "that this user can write",
            order, self._problem,
        )  # fmt: skip

    def _is_there(self) -> bool:
        return self.path is not None and os.path.lexists(self.path)

    def _acquire(self) -> bool:
        """Lock the file for this server; False if another server of this user has it."""
        if self._lock is not None or self.path is None:
            return self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        lock = os.fdopen(descriptor, "r+")
        try:
            # A record lock: forked processes do not inherit it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            lock.close()
            self._problem = (
                f"{str(self.path)!r} is in use by another server of this user that follows the same run; give each "
                "server its own receiver_id or state_dir"
            )
            return False
        self._lock = lock
        return True

    def parse(self, data: bytes) -> StandingOrder:
        """Parse an order. Raises ValueError: invalid bytes. UsageError: its run is not beside the configured one."""
        order = StandingOrder.model_validate_json(data)
        if order.bucket is not None:
            sibling_url(self._settings.bucket, order.bucket)
        return order


def peek_order(settings: Settings) -> StandingOrder | None:
    """Return the order that a server with these settings will load, or None; does not lock the file."""
    kept = StandingOrderStore(settings)
    try:
        order = None if kept.path is None else kept.parse(_read(kept.path))
    except (OSError, ValueError, DeltaSyncError):
        return None
    return order if order is not None and order.setting == settings.target else None


def apply_order(settings: Settings, order: StandingOrder) -> Settings:
    """Return the settings with the order's target and bucket."""
    overrides = {"target": order.target, "bucket": order.bucket}
    return settings.model_copy(update={name: value for name, value in overrides.items() if value is not None})


def sibling_url(configured: str, asked: str) -> str:
    """Return the requested URL, if it is a run beside the configured one.

    Raises:
        UsageError: it is not in the same store under the same prefix.
    """
    parent, own = _split_url(configured)
    beside, name = _split_url(asked)
    if beside != parent or _NAME.fullmatch(name) is None or not own:
        raise UsageError(
            "field 'bucket' names no run beside the configured one; give the configured URL with another last part, of "
            "letters, digits, '.', '_' and '-'"
        )
    if name == own:
        return configured
    root = configured.rstrip("/")
    found = root[: len(root) - len(root.rpartition("/")[2])] + name
    if store_of(found) != store_of(configured):
        raise UsageError(f"the configured run is the whole of {store_of(configured)!r}: no run lies beside it")
    return found


def _split_url(url: str) -> tuple[str, str]:
    """Return a URL's parent and last part. Nothing is decoded, so that an encoded spelling cannot pass the check."""
    text = url.rstrip("/")
    if scheme_of(text) == "file":
        text = text.removeprefix("file://")
        if not text.startswith("/") and not url.lower().startswith("file:"):
            text = f"{Path.cwd()}/{text}"
    parent, _, name = text.rpartition("/")
    return parent, name


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ValueError("other users may have written it")
        data = file.read(MAX_ORDER_BYTES + 1)
    if len(data) > MAX_ORDER_BYTES:
        raise ValueError(f"it has more than {MAX_ORDER_BYTES} bytes")
    return data


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    with suppress(FileNotFoundError):
        part.unlink()
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    os.replace(part, path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: ValueError | DeltaSyncError) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}"[:200]
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
