"""Settings of every program of this project: one model, one table of environment variables, one order of precedence.

A flag or an argument wins over the environment (``DELTA_SYNC_<UPPER>``), and the environment over the TOML file named
by ``DELTA_SYNC_CONFIG``. An unknown name is an error everywhere. Secrets are no settings: a setting names the file of
one, and ``DELTA_SYNC_ADMIN_TOKEN`` is the only one that may come by the environment.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_delta_sync import admin_token
from vllm_delta_sync.errors import SettingsError, UsageError
from vllm_delta_sync.format.documents import RECEIVER_ID, TAG_NAME
from vllm_delta_sync.format.limits import MAX_LEASE_SECONDS, MAX_SLOTS
from vllm_delta_sync.redaction import public_url, redact
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.urls import check_url, scheme_of

ENV_PREFIX = "DELTA_SYNC_"
CONFIG_VARIABLE = "DELTA_SYNC_CONFIG"
NO_SETTINGS = (CONFIG_VARIABLE, admin_token.VARIABLE, admin_token.DIGEST_VARIABLE)
HEAD = "head"
TARGET = rf"^({HEAD}|[0-9]{{1,10}}|tag:{TAG_NAME.pattern})$"
MAX_CONNECTIONS = 256
MIN_BYTES_PER_SECOND = 1_000_000


class StoreOptions(BaseModel):
    """Settings of a store's client. A directory heeds the mirror and the limits of bandwidth only."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    mirror: Annotated[
        str | None,
        Field(
            min_length=1,
            description="URL of a copy or cache of the run in front of the bucket: another bucket, or https:// of any "
            "HTTP cache. Objects are taken from there if their digest is right, else from the bucket.",
        ),
    ] = None
    store_endpoint: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[^@?#]+$",
            description="Address of an S3-compatible store (s3://), of another Hub (hf://) or an emulator. Default: "
            "what the store's own environment variables say.",
        ),
    ] = None
    store_deadline: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="Seconds after which one try of a request is given up; a transfer has a second more for each "
            "MB. With all tries a request takes three times as long at most.",
        ),
    ] = 30.0
    store_connections: Annotated[
        int,
        Field(ge=1, le=MAX_CONNECTIONS, description="Requests that one process has in flight to a store, at most."),
    ] = 16
    store_upload_limit: Annotated[
        int | None, Field(gt=0, description="Bytes per second that one process sends to a store, at most.")
    ] = None
    store_download_limit: Annotated[
        int | None, Field(gt=0, description="Bytes per second that one process takes from a store, at most.")
    ] = None
    store_progress: Annotated[
        Literal["auto", "bar", "log", "off"],
        Field(
            description="What shows transfers that take over two seconds. auto: bars on a terminal, lines in the log "
            "otherwise."
        ),
    ] = "auto"

    def allowance(self, size: int) -> float:
        """Seconds that one try of moving ``size`` bytes may take."""
        return self.store_deadline + size / MIN_BYTES_PER_SECOND

    @property
    def retry_seconds(self) -> float:
        """Seconds after which what has failed is not begun again."""
        return 2 * self.store_deadline


class Settings(StoreOptions):
    """Settings of a receiver. docs/REFERENCE.md is generated from these descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    bucket: Annotated[
        str,
        Field(
            min_length=1,
            description="Run URL to follow: hf://buckets/NAMESPACE/BUCKET/run, s3://bucket/run, gs://bucket/run, "
            "az://container/run, file:///path/run or a plain path.",
        ),
    ]
    target: Annotated[
        str,
        BeforeValidator(lambda value: str(value) if type(value) is int else value),
        Field(
            pattern=TARGET,
            description="Version to serve: head, a version's number, or tag:NAME, which is followed as the tag moves "
            "forward. A server never goes back by itself. POST /delta_sync/target chooses another one at run time.",
        ),
    ] = HEAD
    policy: Annotated[
        Literal["follow", "manual"],
        Field(
            description="follow: every new version is taken at once. manual: only on POST /delta_sync/sync; until then "
            "the bucket is looked into, and `lag` says what waits there."
        ),
    ] = "follow"
    poll_seconds: Annotated[
        float, Field(gt=0, le=3600, description="Seconds between looks into the bucket when no notice comes.")
    ] = 2.0
    notice: Annotated[
        str | None,
        Field(
            pattern=r"^(tcp|ipc)://",
            description="ZeroMQ address of the publisher's notices; none: polling alone.",
        ),
    ] = None
    quarantined: Annotated[
        Literal["skip", "serve"],
        Field(
            description="Versions that the publisher's gate has marked as bad, where target is head. skip: the newest "
            "one that is not marked is served. serve: they are served like any other. Whoever names one, by its number "
            "or by a tag, is served it."
        ),
    ] = "skip"
    trusted_keys: Annotated[
        str | None,
        Field(
            description="Public key files (`delta-sync keygen`), separated by commas. With them, everything that "
            "decides about weights must be signed by one of these keys, or by one that they list in the bucket's "
            "keys.json; and what is older than what was seen before, or of another run, is refused."
        ),
    ] = None
    state_dir: Annotated[
        Path | None,
        Field(
            description="Directory of this user, on a disk that outlives the server, where it keeps what it was told "
            "at run time (a hold, a target) and, with `trusted_keys`, what it has seen of the run. Default: "
            "`vllm-delta-sync` in $XDG_STATE_HOME or ~/.local/state."
        ),
    ] = None
    expired_head: Annotated[
        Literal["warn", "refuse"],
        Field(
            description="With `trusted_keys`, when HEAD.json has run out or is gone: its publisher has ended, or "
            "somebody hides what came later. warn: shown in status and log. refuse: no new version is taken either."
        ),
    ] = "warn"
    notice_key: Annotated[
        Path | None,
        Field(
            description="File with this server's secret CURVE certificate (`delta-sync keygen PATH --notice`), for "
            "encrypted notices; goes with `notice_server_key`. None but this user may read it."
        ),
    ] = None
    notice_server_key: Annotated[
        Path | None,
        Field(description="File with the public CURVE certificate of the publisher or broker that notices come from."),
    ] = None
    pause_mode: Annotated[
        Literal["keep", "wait", "abort"],
        Field(
            description="Requests in flight at a commit. keep: go on with the new weights. wait: finish first. "
            "abort: end them."
        ),
    ] = "keep"
    wait_seconds: Annotated[
        float,
        Field(
            gt=0,
            le=86400,
            description="With `pause_mode` wait: longest that a commit waits for requests in flight to finish, while "
            "new ones wait. After that generation goes on as before, and the commit is tried again later.",
        ),
    ] = 600.0
    prefix_cache: Annotated[
        Literal["reset", "keep"],
        Field(
            description="KV cache at a commit. reset: dropped, running requests recompute theirs. keep: cached keys "
            "and values of the older policy stay in use."
        ),
    ] = "reset"
    pause_seconds: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="Longest that generation stands still for a commit. A rank that does not answer within counts "
            "as hung, and the engine is ended; a pause whose controller is lost is ended by the engine itself.",
        ),
    ] = 30.0
    stage_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Memory that versions folded into one commit may take in each rank while they are staged. A "
            "single version is always taken whole.",
        ),
    ] = 2 * 1024**3
    undo_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Memory of each rank for the undo log: commits that POST /delta_sync/rollback takes back "
            "without the bucket.",
        ),
    ] = 1024**3
    rescan_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Weights, in bytes, that are gathered and compared beside each staging, all tensors in turn, "
            "so that changes from outside are noticed. 0: none.",
        ),
    ] = 64 * 1024**2
    cache_dir: Annotated[
        Path | None,
        Field(
            description="Directory of this user on a local disk where the ranks and servers of a node share what they "
            "fetch, so that each object is downloaded once per node. Default: `vllm-delta-sync` in $XDG_CACHE_HOME or "
            "~/.cache; none for a bucket in a directory, from which each rank reads for itself."
        ),
    ] = None
    cache_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Bytes that `cache_dir` may hold; beyond that the least recently used objects are removed, "
            "and an object larger than that is not kept. 0: no cache.",
        ),
    ] = 8 * 1024**3
    receiver_id: Annotated[
        str | None,
        Field(
            pattern=rf"^{RECEIVER_ID.pattern}$",
            description="Name of this server, one of its own among those of the run, under which it tells in the "
            "bucket what it serves and may go back to, for `delta-sync fleet`, for who waits for a version, and for "
            "retention. Without it nothing is written.",
        ),
    ] = None
    lease_seconds: Annotated[
        int,
        Field(
            ge=3,
            le=MAX_LEASE_SECONDS,
            description="How long what is told under `receiver_id` holds: a server that is gone is waited for, and its "
            "versions are kept, no longer. It is told again after a third of that, and whenever something changes.",
        ),
    ] = 60
    fleet_pauses: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_SLOTS,
            description="Servers of the run that may be paused at once for a commit, where all of them have this "
            "setting: they take turns, by objects in the bucket. Goes with `receiver_id`. None: whenever they like.",
        ),
    ] = None
    max_lag: Annotated[
        int | None,
        Field(
            ge=0,
            description="Versions behind the newest that following leads to (or a number given as `target`) beyond "
            "which GET /delta_sync/ready says no. none: any lag is fine.",
        ),
    ] = None
    min_version_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="Longest that a request with the header X-Delta-Sync-Min-Version waits for its version.",
        ),
    ] = 30.0
    admin_token_file: Annotated[
        Path | None,
        Field(
            description="File with the token that state-changing routes ask for; or give the token itself as the "
            "environment variable DELTA_SYNC_ADMIN_TOKEN. Without either they answer loopback only."
        ),
    ] = None

    def admin_token(self, environment: Mapping[str, str] | None = None) -> admin_token.AdminToken | None:
        """The token of ``admin_token_file`` or of the environment. Errors as ``admin_token.load``."""
        return admin_token.load(self.admin_token_file, environment)

    def store(self) -> StoreOptions:
        """How to talk to the store: this, without what is not about that."""
        return StoreOptions(**{field: getattr(self, field) for field in StoreOptions.model_fields})

    def keyring(self) -> Keyring:
        """The keys that are trusted; the files are read anew. Raises SettingsError: one cannot be used."""
        return Keyring.load(self.trusted_keys)

    def cache_folder(self) -> Path | None:
        """Where objects are kept for all ranks and servers of this node; None: nowhere."""
        if self.cache_bytes == 0:
            return None
        if self.cache_dir is not None or scheme_of(self.bucket) == "file":
            return self.cache_dir
        try:
            return _user_cache()
        except RuntimeError:
            return None  # a user without a home does without the cache too

    def models_folder(self) -> Path:
        """Where ``delta-sync serve`` without MODEL writes the model files of runs. Raises SettingsError: no home."""
        try:
            return (self.cache_dir or _user_cache()) / "models"
        except RuntimeError as error:
            raise SettingsError("this user has no home directory; set cache_dir") from error

    def state_folder(self) -> Path:
        """Where marks are kept. Raises SettingsError: this user has no home."""
        if self.state_dir is not None:
            return self.state_dir
        try:
            state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise SettingsError("this user has no home directory; set state_dir") from error
        return Path(state) / "vllm-delta-sync"

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """A bucket's URL may hold credentials; what prints settings must not."""
        for name, value in super().__repr_args__():
            yield name, public_url(value) if isinstance(value, str) else value


class ClientSettings(Settings):
    """Settings of every other program: commands, publishers and what reads runs. They may sign, and need no bucket."""

    bucket: str = ""
    signing_key: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Private key file (`delta-sync keygen`) that signs what commands and publishers write. A "
            "server refuses to start with it: who has the signing key decides what is served.",
        ),
    ] = None

    def keyring(self, signs: bool = False) -> Keyring:
        """The keys that are trusted; the files are read anew.

        Args:
            signs: read the signing key too, and trust it if no key is trusted by name.

        Raises:
            SettingsError: a key file cannot be used.
        """
        return Keyring.load(self.trusted_keys, self.signing_key if signs else None)


_Model = TypeVar("_Model", bound=Settings)


def _user_cache() -> Path:
    """Where this user's caches of this package lie. Raises RuntimeError: the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-delta-sync"


def environment_name(field: str) -> str:
    """``poll_seconds`` → ``DELTA_SYNC_POLL_SECONDS``."""
    return ENV_PREFIX + field.upper()


def load_settings(overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of a receiver, from overrides, environment and file.

    Args:
        overrides: values that win over everything; None values are ignored.
        environment: instead of ``os.environ``.

    Raises:
        SettingsError: an unknown name, a value that does not fit, no bucket, a signing key, or an unreadable file.
    """
    given = _Given.read(overrides, environment)
    if "signing_key" in given.values:
        source = given.sources["signing_key"] or "an argument"
        raise SettingsError(
            f"{source} sets signing_key: who has the signing key decides what is served, so it has no business on a "
            "server; take it out, and give trusted_keys"
        )
    settings = given.validated(Settings)
    check_bucket(settings.bucket)
    if (settings.notice_key is None) != (settings.notice_server_key is None):
        missing = "notice_key" if settings.notice_key is None else "notice_server_key"
        raise SettingsError(f"setting {missing!r} is missing; notice_key and notice_server_key go together")
    if settings.fleet_pauses is not None and settings.receiver_id is None:
        raise SettingsError(
            f"setting 'receiver_id' is missing: servers take turns (fleet_pauses = {settings.fleet_pauses}) under names"
        )
    return settings


def client_settings(
    overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> ClientSettings:
    """The settings of a command, a publisher or a reader, from overrides, environment and file.

    Args:
        overrides, environment: as of ``load_settings``.

    Raises:
        SettingsError: an unknown name, a value that does not fit, or an unreadable file.
    """
    return _Given.read(overrides, environment).validated(ClientSettings)


def check_bucket(url: str) -> None:
    """Raise SettingsError if no bucket can have that URL."""
    try:
        check_url(url)
    except UsageError as error:
        raise SettingsError(f"setting 'bucket': {error.message}") from error


@dataclass(frozen=True)
class _Given:
    """Settings as they were given, by name, and where each one is from."""

    values: dict[str, Any]
    sources: dict[str, str]

    @classmethod
    def read(cls, overrides: Mapping[str, Any] | None, environment: Mapping[str, str] | None) -> "_Given":
        environment = os.environ if environment is None else environment
        given = cls({}, {})
        path = environment.get(CONFIG_VARIABLE)
        if path:
            for name, value in _from_file(path).items():
                given._add(name, value, f"{CONFIG_VARIABLE}={path!r}")
        for variable, text in environment.items():
            if variable.startswith(ENV_PREFIX) and variable not in NO_SETTINGS:
                name = variable.removeprefix(ENV_PREFIX).lower()
                if name not in ClientSettings.model_fields:
                    raise SettingsError(
                        f"environment variable {variable} is not a setting; known are "
                        + ", ".join(environment_name(known) for known in ClientSettings.model_fields)
                    )
                if text or name not in _EMPTY_IS_UNSET:
                    given._add(name, text, f"environment variable {variable}")
        for name, value in (overrides or {}).items():
            if value is not None:
                given._add(name, value, "")
        return given

    def _add(self, name: str, value: Any, source: str) -> None:
        if name not in ClientSettings.model_fields:
            known = ", ".join(ClientSettings.model_fields)
            raise SettingsError(f"setting {name!r} is unknown{f' (in {source})' if source else ''}; known are {known}")
        self.values[name], self.sources[name] = value, source

    def validated(self, model: type[_Model]) -> _Model:
        try:
            return model.model_validate(self.values)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            field = str(problem["loc"][0])
            if problem["type"] == "missing":
                message = f"setting {field!r} is missing; set {environment_name(field)} or --{field.replace('_', '-')}"
            else:
                source = f" (from {self.sources[field]})" if self.sources[field] else ""
                message = f"setting {field!r} is {redact(str(problem['input']))[:80]!r}{source}: {problem['msg']}"
            raise SettingsError(message) from error


_EMPTY_IS_UNSET = frozenset(("bucket", "cache_dir", "cache_bytes", *StoreOptions.model_fields))
"""Settings whose variable may be empty. Any other empty one is an error: it may have been meant to name keys."""


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={path!r} cannot be read as TOML: {error}") from error
