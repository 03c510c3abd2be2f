"""How stores are talked to: deadlines, limits, a mirror. One table of environment variables for every program."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.redaction import redact

ENV_PREFIX = "DELTA_SYNC_"
MOST_CONNECTIONS = 256


class StoreOptions(BaseModel):
    """What a store's client can be told. A directory heeds the mirror and the limits of bandwidth only.

    The names are settings of the receiving side too, and environment variables (``DELTA_SYNC_<UPPER>``) of everything
    that opens a bucket without being given options: publishers and the command line.
    """

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
        Field(ge=1, le=MOST_CONNECTIONS, description="Requests that one process has in flight to a store, at most."),
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
        return self.store_deadline + size / SLOWEST_BYTES_PER_SECOND

    @property
    def retry_seconds(self) -> float:
        """Seconds after which what has failed is not begun again."""
        return 2 * self.store_deadline


SLOWEST_BYTES_PER_SECOND = 1_000_000


def options_from(environment: Mapping[str, str] | None = None) -> StoreOptions:
    """The options that the environment gives.

    Raises:
        SettingsError: a value does not fit.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {
        field: environment[ENV_PREFIX + field.upper()]
        for field in StoreOptions.model_fields
        if environment.get(ENV_PREFIX + field.upper())
    }
    try:
        return StoreOptions.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        name = ENV_PREFIX + str(problem["loc"][0]).upper()
        raise SettingsError(f"{name} is {redact(str(problem['input']))[:80]!r}: {problem['msg']}") from error
