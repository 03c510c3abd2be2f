"""Names of metrics in TRL's log."""

SERVED_VERSION = "sample/served_version"
"""The versions that sampled the tokens of a step's batch, on average: noted by ``VersionedRolloutLoop``."""
TRL_STALENESS = "sample/staleness_mean"
WEIGHT_SYNC = "perf/weight_sync_s"
"""Seconds that a weight sync kept training waiting."""
