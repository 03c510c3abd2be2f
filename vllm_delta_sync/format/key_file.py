"""keys.json: whose signatures count in a run."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_delta_sync.format import limits
from vllm_delta_sync.format.manifest import Digest, Document, FormatVersion, Hex32, PublicKey, Timestamp, Version


class KeyValidity(BaseModel):
    """Up to which version a key's word holds, along the chain that leads to that version's manifest."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    version: Version
    manifest: Digest


class KeyEntry(BaseModel):
    """What a key may sign.

    Attributes:
        last: null for a key in use; where it is retired or revoked, the last version that it holds for, null for none.
        revoked: somebody else may have it. Of what it signed only the manifests up to ``last`` hold, and they because
            the chain leads to them.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    key: PublicKey
    last: KeyValidity | None = None
    revoked: bool = False


class KeyFile(Document):
    """keys.json: which keys may sign the run, besides those that a reader trusts anyhow, and which may no more.

    Attributes:
        info: digest of run.json, which holds whoever has signed it.
        sequence: grows with every change; a reader refuses one that is older than what it has seen.
        signature: of a key that the reader was told to trust; one that is only listed here may not change the list.
    """

    KIND = "keys"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    info: Digest
    sequence: Annotated[int, Field(ge=1, le=2**53 - 1)]
    keys: Annotated[list[KeyEntry], Field(max_length=limits.MAX_KEYS)]
    created_at: Timestamp

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len({entry.key for entry in self.keys}) != len(self.keys):
            raise ValueError("a key is listed twice")
        return self

    def entry(self, key: str) -> KeyEntry | None:
        """What it says of a key, if anything."""
        return next((entry for entry in self.keys if entry.key == key), None)
