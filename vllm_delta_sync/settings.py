"""``Settings`` of a receiver and ``ClientSettings`` of every other program, with one order of precedence.

A flag or an argument overrides the environment (``DELTA_SYNC_<UPPER>``), and the environment overrides the TOML file
named by ``DELTA_SYNC_CONFIG``. An unknown name is an error everywhere. Secrets are not settings: a setting names the
file of a secret. ``DELTA_SYNC_ADMIN_TOKEN`` is the only secret in an environment variable.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vllm_delta_sync import admin_token, units
from vllm_delta_sync.errors import SettingsError, UsageError
from vllm_delta_sync.format.documents import RECEIVER_ID, TAG_NAME
from vllm_delta_sync.format.limits import MAX_HEARTBEAT_SECONDS
from vllm_delta_sync.logs import public_url, redact
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.urls import check_url, scheme_of

ENV_PREFIX = "DELTA_SYNC_"
CONFIG_VARIABLE = "DELTA_SYNC_CONFIG"
ON_UPDATE_VARIABLES = ("DELTA_SYNC_FOLDER", "DELTA_SYNC_VERSION", "DELTA_SYNC_STEP")
"""What the command after a version of ``delta-sync follow`` is given; it may call delta-sync itself."""
NO_SETTINGS = (CONFIG_VARIABLE, admin_token.VARIABLE, admin_token.DIGEST_VARIABLE, *ON_UPDATE_VARIABLES)
HEAD = "head"
TARGET = rf"^({HEAD}|[0-9]{{1,10}}|tag:{TAG_NAME.pattern})$"
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,99}$"


def _as_path(path: Path) -> Path:
    if str(path)[0] in "\"'":
        raise ValueError("it begins with a quote, as from Docker's env file, which keeps quotes; remove it")
    return Path(os.path.expanduser(path))


HomePath = Annotated[Path, AfterValidator(_as_path)]
"""A path that may begin with ``~``, which no shell replaces in a file of settings."""
MAX_CONNECTIONS = 256
MIN_BYTES_PER_SECOND = 1_000_000
TIMES = ("_seconds", "_deadline")
SIZES = ("_bytes",)
"""Ends of the names of settings in seconds, and in bytes."""


def _without_unit(name: str, value: object) -> object:
    if not isinstance(value, str) or not value[-1:].isalpha():
        return value
    found = units.duration(value) if name.endswith(TIMES) else units.byte_count(value) if name.endswith(SIZES) else None
    return value if found is None else found


class StoreOptions(BaseModel):
    """Settings of a store's client. For a directory, only the mirror applies."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    mirror: Annotated[str | None, Field(min_length=1)] = None
    """URL of a copy or cache of the run: another bucket, or https:// of any HTTP cache. Objects are read from there
    if their digest is right, else from the bucket."""
    peer: Annotated[str | None, Field(min_length=1)] = None
    """URLs of servers of the run, or of `delta-sync mirror`, separated by commas. Objects are read from the first that
    has them, before mirror and bucket. All servers may have the same list, themselves included. Requires the admin
    token, which must be the same everywhere."""
    store_endpoint: Annotated[str | None, Field(pattern=r"^https?://[^@?#]+$")] = None
    """Address of an S3-compatible store (s3://), another Hub (hf://) or an emulator. Default: from the store's own
    environment variables."""
    store_deadline: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Timeout in seconds of one attempt of a request; a transfer gets one more second per MB. With all attempts a
    request takes at most three times as long."""
    store_connections: Annotated[int, Field(ge=1, le=MAX_CONNECTIONS)] = 16
    """Most requests that one process has in flight to a store."""
    store_progress: Literal["auto", "bar", "log", "off"] = "auto"
    """How transfers of more than two seconds are shown. auto: bars on a terminal, otherwise lines in the log."""

    @model_validator(mode="before")
    @classmethod
    def _read_units(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read ``90s`` and ``500MB``; numbers, and what is neither, are left to the fields."""
        return {name: _without_unit(name, value) for name, value in values.items()}

    def allowance(self, size: int) -> float:
        """Return the timeout in seconds of one attempt to transfer ``size`` bytes."""
        return self.store_deadline + size / MIN_BYTES_PER_SECOND

    def without_copies(self) -> "StoreOptions":
        """Return the options of the bucket itself, without mirror and peers."""
        return self.model_copy(update={"mirror": None, "peer": None})

    @property
    def retry_seconds(self) -> float:
        """Seconds after which a failed request is not retried."""
        return 2 * self.store_deadline


class Settings(StoreOptions):
    """Settings of a receiver. The reference, and the help of ``delta-sync serve``, show the texts below the fields."""

    bucket: Annotated[str, Field(min_length=1)]
    """Run URL to follow: hf://buckets/NAMESPACE/BUCKET/run, s3://bucket/run, gs://bucket/run, az://container/run,
    file:///path/run or a plain path."""
    lora_name: Annotated[str | None, Field(pattern=ADAPTER_NAME)] = None
    """Name under which the run in `bucket` is served, if it is the run of a LoRA adapter: requests ask for it as
    `model`. vLLM loads the base itself. Requires --enable-lora."""
    lora_adapters: Annotated[str | None, Field(min_length=1)] = None
    """Further LoRA adapters to serve beside the run in `bucket`, as NAME=URL of their runs, separated by commas;
    each follows the head of its run. Requires --enable-lora."""
    target: Annotated[
        str, BeforeValidator(lambda value: str(value) if type(value) is int else value), Field(pattern=TARGET)
    ] = HEAD
    """Version to serve: head, a version's number, or tag:NAME, which is followed as the tag moves forward. A server
    never rolls back by itself. POST /delta_sync/target changes the target at run time."""
    policy: Literal["follow", "manual"] = "follow"
    """follow: update to each new version at once. manual: update only on POST /delta_sync/sync; the bucket is still
    polled, and `lag` shows how many versions are waiting."""
    poll_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """Seconds from one poll of the bucket to the next when no notice arrives; each interval differs by up to a
    quarter, so that the servers of a run poll at different moments."""
    notice: Annotated[str | None, Field(pattern=r"^(tcp|ipc)://")] = None
    """ZeroMQ address of the publisher's notices; none: polling only."""
    quarantined: Literal["skip", "serve"] = "skip"
    """Versions that failed the publisher's update gate, when the target is head. skip: serve the newest version
    that is not quarantined. serve: serve them like any other. A target that names one, by number or by tag, is
    always served."""
    require_exact: bool = False
    """When the target is head: serve only versions that are the trainer's exact state, not those of a publisher
    with a byte budget that hold changes back. A target that names one, by number or by tag, is always served."""
    trusted_keys: str | None = None
    """Public key files (`delta-sync keygen`), separated by commas. With them, every document that decides about
    weights must be signed by one of these keys; and an older state than seen before, or another run, is refused. To
    change a key without a stop, name the old one and the new one."""
    state_dir: HomePath | None = None
    """This user's directory, on a disk that outlives the server, for orders given at run time (a hold, a target)
    and, with `trusted_keys`, for what the server has seen of the run. Default: `vllm-delta-sync` in $XDG_STATE_HOME
    or ~/.local/state."""
    expired_head: Literal["warn", "refuse"] = "warn"
    """With `trusted_keys`, when HEAD.json has expired or is missing: its publisher has ended, or newer versions are
    hidden. warn: show it in status and log. refuse: also update to no new version."""
    notice_key: HomePath | None = None
    """File with this server's secret CURVE certificate (`delta-sync keygen PATH --notice`), for encrypted notices;
    requires `notice_server_key`. Only this user may be able to read the file."""
    notice_server_key: HomePath | None = None
    """File with the public CURVE certificate of the publisher or broker that notices come from."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight at a commit. keep: continue with the new weights. wait: finish first. abort: abort
    them."""
    wait_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """With `pause_mode` wait: longest time that a commit waits for requests in flight to finish, while new requests
    queue. After that generation continues, and the commit is retried later."""
    prefix_cache: Literal["reset", "salt", "keep"] = "reset"
    """Cached keys and values at a commit. reset: drop them; running requests recompute theirs. salt: nothing is
    dropped, and later requests find only what the weights served then have computed; running requests continue with
    theirs. keep: those of older weights stay in use. Give it to the engine's process too, before it starts."""
    pause_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest pause of generation for a commit. A rank that does not answer in time counts as hung, and the engine
    is ended; a pause whose controller is lost is ended by the engine itself."""
    stage_bytes: Annotated[int, Field(ge=0)] = 2 * 1024**3
    """Memory of each rank for versions that are staged together and merged into one commit. A single version is
    always staged whole."""
    undo_bytes: Annotated[int, Field(ge=0)] = 1024**3
    """Memory of each rank for the undo log: commits that POST /delta_sync/rollback can revert without the
    bucket."""
    device_staging_bytes: Annotated[int, Field(ge=0)] = 2 * 1024**3
    """Memory of each rank's device for the changes of one version, which are uploaded before the pause. At most
    half of the device's free memory is used. Changes that find no room pass through a buffer of 32 MiB during the
    pause, which makes it longer. From 16 MiB on, up to 128 MiB serve to decode versions on the device; with less, the
    host decodes. Does not apply on a CPU. 0: all changes pass through the buffer."""
    rescan_bytes: Annotated[int, Field(ge=0)] = 64 * 1024**2
    """Bytes of weights that each staging also hashes and compares, tensor after tensor in rotation, to detect
    changes from outside. 0: none."""
    cache_dir: HomePath | None = None
    """This user's directory on a local disk where the ranks and servers of a node share downloads, so that each
    object is downloaded once per node. Default: `vllm-delta-sync` in $XDG_CACHE_HOME or ~/.cache; none for a bucket
    in a directory, which each rank reads itself."""
    cache_bytes: Annotated[int, Field(ge=0)] = 8 * 1024**3
    """Largest size of `cache_dir` in bytes; beyond it, or beyond 2,048 objects, the least recently used ones are
    removed, and a larger object is not cached. 0: no cache."""
    receiver_id: Annotated[str | None, Field(pattern=rf"^{RECEIVER_ID.pattern}$")] = None
    """Name of this server, unique in the run. Under it the server writes heartbeats to the bucket: what it serves
    and may roll back to, for `delta-sync fleet list`, for waiting for a version, and for retention. Without it
    nothing is written."""
    heartbeat_seconds: Annotated[int, Field(ge=3, le=MAX_HEARTBEAT_SECONDS)] = 60
    """Validity of a heartbeat under `receiver_id`: after it nothing waits for a lost server, and its versions are
    no longer retained. Heartbeats are written after a third of it, and at each change."""
    max_lag: Annotated[int | None, Field(ge=0)] = None
    """Largest lag, in versions behind the target, at which GET /delta_sync/ready reports ready. none: any lag."""
    min_version_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Longest time that a request with the header X-Delta-Sync-Min-Version waits for its version."""
    log_format: Literal["text", "json"] = "text"
    """Form of this project's log lines, on servers and publishers. text: as vLLM's, or the trainer's, logging is
    set up. json: one JSON object per line; vLLM's own lines stay as they are."""
    admin_token_file: HomePath | None = None
    """File with the token that state-changing routes require; or set the environment variable
    DELTA_SYNC_ADMIN_TOKEN to the token. Without either, these routes answer loopback only."""

    def adapters(self) -> dict[str, "Settings"]:
        """Return name → settings of each run in ``lora_adapters``. Raises SettingsError: an entry is invalid."""
        found: dict[str, Settings] = {}
        for entry in (self.lora_adapters or "").split(",") if self.lora_adapters else ():
            name, _, url = entry.strip().partition("=")
            if not re.match(ADAPTER_NAME, name) or not url:
                raise SettingsError(f"lora_adapters has {redact(entry)[:80]!r}, which is not NAME=URL")
            if name in found or name == self.lora_name:
                raise SettingsError(f"lora_adapters: adapter {name!r} is named twice")
            try:
                check_url(url)
            except UsageError as error:
                raise SettingsError(f"lora_adapters: adapter {name!r}: {error.message}") from error
            # A mirror holds the objects of one run.
            found[name] = self.model_copy(
                update={"bucket": url, "mirror": None, "lora_name": name, "lora_adapters": None, "target": HEAD}
            )
        return found

    def admin_token(self, environment: Mapping[str, str] | None = None) -> admin_token.AdminToken | None:
        """Return the token of ``admin_token_file`` or of the environment. Errors as ``admin_token.load``."""
        return admin_token.load(self.admin_token_file, environment)

    def store(self) -> StoreOptions:
        """Return the settings of the store's client only."""
        return StoreOptions(**{field: getattr(self, field) for field in StoreOptions.model_fields})

    def keyring(self) -> Keyring:
        """Return the trusted keys, read from their files each time. Raises SettingsError: a key file is unusable."""
        return Keyring.load(self.trusted_keys)

    def cache_folder(self) -> Path | None:
        """Return the directory where ranks and servers of this node cache objects; None for no cache."""
        if self.cache_bytes == 0:
            return None
        if self.cache_dir is not None or scheme_of(self.bucket) == "file":
            return self.cache_dir
        try:
            return _user_folder("XDG_CACHE_HOME", ".cache", "cache_dir")
        except SettingsError:
            return None

    def models_folder(self) -> Path:
        """Return the directory for the model files of runs that ``delta-sync serve`` without MODEL writes.

        Raises:
            SettingsError: this user has no home directory.
        """
        return (self.cache_dir or _user_folder("XDG_CACHE_HOME", ".cache", "cache_dir")) / "models"

    def state_folder(self) -> Path:
        """Return ``state_dir`` or its default. Raises SettingsError: this user has no home directory."""
        return self.state_dir or _user_folder("XDG_STATE_HOME", ".local/state", "state_dir")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show URLs without credentials."""
        for name, value in super().__repr_args__():
            yield name, public_url(value) if isinstance(value, str) else value


class ClientSettings(Settings):
    """Settings of commands, publishers and readers: without a required bucket, and with a signing key."""

    bucket: str = ""
    signing_key: Annotated[str | None, Field(min_length=1)] = None
    """Private key file (`delta-sync keygen`) that signs what commands and publishers write. A server refuses to
    start with it, because anyone with the signing key decides what is served."""

    def keyring(self, signs: bool = False) -> Keyring:
        """Return the trusted keys, read from their files at each call.

        Args:
            signs: read the signing key too, and trust it if ``trusted_keys`` is not set.

        Raises:
            SettingsError: a key file cannot be used.
        """
        return Keyring.load(self.trusted_keys, self.signing_key if signs else None)


_Model = TypeVar("_Model", bound=Settings)


def _user_folder(variable: str, default: str, setting: str) -> Path:
    """Return this package's folder in the one that a variable names, or by default in one of this user's home.

    Raises:
        SettingsError: there is no home directory; the message names the setting.
    """
    try:
        return Path(os.environ.get(variable) or Path.home() / default) / "vllm-delta-sync"
    except RuntimeError as error:
        raise SettingsError(f"this user has no home directory; set {setting}") from error


def environment_name(field: str) -> str:
    """Map ``poll_seconds`` → ``DELTA_SYNC_POLL_SECONDS``."""
    return ENV_PREFIX + field.upper()


def load_settings(overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a receiver, from overrides, environment and file.

    Args:
        overrides: values with the highest precedence; None values are ignored.
        environment: replaces ``os.environ``.

    Raises:
        SettingsError: an unknown name, an invalid value, no bucket, a signing key, or an unreadable file.
    """
    given = _RawSettings.read(overrides, environment)
    if "signing_key" in given.values:
        source = given.sources["signing_key"] or "an argument"
        raise SettingsError(
            f"{source} sets signing_key, but anyone with the signing key decides what is served; remove it from this "
            "server, and set trusted_keys"
        )
    settings = given.validated(Settings)
    check_bucket(settings.bucket)
    return settings


def client_settings(overrides: Mapping[str, Any] | None = None) -> ClientSettings:
    """Return the settings of a command, a publisher or a reader, from overrides, environment and file.

    Args:
        overrides: see ``load_settings``.

    Raises:
        SettingsError: an unknown name, an invalid value, or an unreadable file.
    """
    return _RawSettings.read(overrides, None).validated(ClientSettings)


def check_bucket(url: str) -> None:
    """Raise SettingsError if the URL is invalid for any bucket."""
    try:
        check_url(url)
    except UsageError as error:
        raise SettingsError(f"setting 'bucket': {error.message}") from error


@dataclass(frozen=True)
class _RawSettings:
    """Unvalidated values by setting, and the source of each."""

    values: dict[str, Any]
    sources: dict[str, str]

    @classmethod
    def read(cls, overrides: Mapping[str, Any] | None, environment: Mapping[str, str] | None) -> "_RawSettings":
        environment = os.environ if environment is None else environment
        given = cls({}, {})
        path = environment.get(CONFIG_VARIABLE)
        if path:
            for name, value in _from_file(path).items():
                given._add(name, value, f"{CONFIG_VARIABLE}={path!r}")
        for variable, text in environment.items():
            if variable.startswith(ENV_PREFIX) and variable not in NO_SETTINGS:
                name = variable.removeprefix(ENV_PREFIX).lower()
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
"""Settings whose variable may be empty. Any other empty variable is an error: perhaps it should have named keys."""


def _from_file(path: str) -> dict[str, Any]:
    try:
        # Editors of Windows begin a file with a mark of its encoding.
        return tomllib.loads(Path(path).read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={path!r} cannot be read as TOML: {error}") from error
