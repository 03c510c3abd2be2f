"""``logger``: where the engine logs, secrets redacted. A child of vLLM's logger, the only one with a handler."""

from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger("vllm.delta_sync")
