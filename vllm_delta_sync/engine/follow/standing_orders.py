"""``StandingOrderStore`` keeps the target and the hold that an operator set at run time across restarts.

Each configured run URL (and ``receiver_id``) has one small file, written before the request is answered. A damaged file
means that there was an order. The server then holds the version it starts with until the next order, because the lost
order may have been meant to avoid the newest version.
"""

from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.durable_files import StateFile
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import DeltaSyncError, SettingsError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.settings import TARGET, Settings

MAX_ORDER_BYTES = 16 * 1024


class StandingOrder(BaseModel):
    """An operator's order.

    Attributes:
        setting: the setting ``target`` when the order was given; if it has changed since, the order is dropped.
        target: chosen at run time; None means as configured.
        bucket: None; releases before 0.3 could name another run.
        holding: whether new versions are ignored. run, version: what is held; None if no version was served yet.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    format: Literal[1] = 1
    setting: str
    target: Annotated[str, Field(pattern=TARGET)] | None = None
    bucket: None = None
    holding: bool = False
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the order changes nothing."""
        return self.target is None and not self.holding

    def __str__(self) -> str:
        parts = [] if self.target is None else [f"target {self.target}"]
        if self.holding:
            parts.append("hold" if self.version is None else f"hold at version {self.version}")
        return ", ".join(parts) or "none"


class StandingOrderStore:
    """The file with a server's standing order. If it cannot be written, a warning is logged.

    Raises:
        UsageError: the bucket, or what is asked before it, cannot be opened with these settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._saved: StandingOrder | None = None
        self._file: StateFile | None = None
        self._problem = ""
        self._warned: tuple[StandingOrder, str] | None = None
        name = open_bucket(settings.bucket, settings.store()).url
        if settings.receiver_id is not None:
            name = f"{name}\n{settings.receiver_id}"
        if settings.lora_name is not None:  # of several adapters of one server
            name = f"{name}\nadapter {settings.lora_name}"
        try:
            path = settings.state_folder() / f"{sha256(name.encode()).hexdigest()[:32]}.order"
            self._file = StateFile(path, MAX_ORDER_BYTES)
        except SettingsError as error:
            self._problem = error.message

    @property
    def path(self) -> Path | None:
        """The file; None if there is no usable folder."""
        return None if self._file is None else self._file.path

    def load(self) -> StandingOrder | None:
        """Return the stored order, or None. If the file cannot be read: an order that holds, without a version."""
        if self._file is None or not self._file.exists():
            return None
        unread = StandingOrder(setting=self._settings.target, holding=True)
        try:
            if not self._acquire(self._file):
                logger.warning("the standing order is ignored: %s", self._problem)
                return None
            self._saved = self.read()
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
        there = self._file is not None and self._file.exists()
        if order == self._saved or (self._saved is None and order.is_empty and not there):
            return
        try:
            if self._file is not None and self._acquire(self._file):
                if order.is_empty:
                    self._file.remove()
                else:
                    self._file.write(order.model_dump_json().encode())
                self._saved = None if order.is_empty else order
                return
        except OSError as error:
            self._problem = (
                f"{str(self.path)!r} cannot be written: {error.strerror}; make room, or set state_dir to a directory "
                "that this user can write"
            )
        if self._warned == (order, self._problem):
            return
        self._warned = order, self._problem
        logger.warning("the standing order (%s) is in force, but will not survive a restart: %s", order, self._problem)

    def release(self) -> None:
        """Let another server, or another object of this process, write the file."""
        if self._file is not None:
            self._file.release()

    def read(self) -> StandingOrder:
        """Return the stored order; does not lock the file.

        Raises:
            SettingsError: there is no usable folder. OSError, ValueError: the file cannot be read, or has no order.
        """
        if self._file is None:
            raise SettingsError(self._problem)
        return StandingOrder.model_validate_json(self._file.read())

    def _acquire(self, file: StateFile) -> bool:
        """Lock the file for this server; False if another server of this user has it."""
        acquired = file.acquire()
        if not acquired:
            self._problem = (
                f"{str(file.path)!r} is in use by another server of this user, or another engine of this process, that "
                "follows the same run; give each its own receiver_id or state_dir"
            )
        return acquired


def peek_order(settings: Settings) -> StandingOrder | None:
    """Return the order that a server with these settings will load, or None; does not lock the file."""
    store = StandingOrderStore(settings)
    try:
        order = store.read()
    except (OSError, ValueError, DeltaSyncError):
        return None
    return order if order.setting == settings.target else None


def _first_line(error: ValueError | DeltaSyncError) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}"[:200]
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
