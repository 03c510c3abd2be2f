"""``may_be_served`` decides whether a version may generate; ``newest_to_serve`` finds the newest one that may.

Whether its signature is trusted is decided before, when its manifest is read (``trust``).
"""

from dataclasses import dataclass

from vllm_delta_sync.errors import DataError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.settings import Settings


@dataclass(frozen=True)
class ServicePolicy:
    """Which versions may be served.

    Attributes:
        quarantined: whether versions that a gate has quarantined may. exact: whether only versions that are the
            trainer's exact state may.
        requested: a version that was asked for by its number or tag, which may in any case.
    """

    quarantined: bool = False
    exact: bool = False
    requested: int | None = None

    @classmethod
    def of_settings(cls, settings: Settings) -> "ServicePolicy":
        """Return the policy of a server."""
        return cls(settings.quarantined == "serve", settings.require_exact)


def may_be_served(manifest: Manifest, policy: ServicePolicy) -> bool:
    """Return whether a version may be served under a policy."""
    if manifest.version == policy.requested:
        return True
    return (policy.quarantined or manifest.quarantine is None) and (not policy.exact or manifest.held_back is None)


def newest_to_serve(run: RunReader, head: Manifest, policy: ServicePolicy) -> int | None:
    """Return the newest version up to ``head`` that servers serve by themselves; None if there is none.

    Each manifest names the newest version before it that is not quarantined, and the newest exact one. So mostly no
    manifest is read, and if ``policy.exact`` and the head is not exact, usually one.

    Raises:
        StoreError: the store failed.
    """
    manifest = head
    while not may_be_served(manifest, policy):
        sound = manifest.version if policy.quarantined else manifest.sound
        version = manifest.exact if sound == manifest.version else sound
        if version is None or not policy.exact:
            return version
        try:
            manifest = run.manifest(version)
        except DataError:
            return version  # the planner reports the error
    return manifest.version
