"""``logger`` redacts secrets. It is a child of vLLM's logger, which is the only logger with a handler."""

from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger("vllm.delta_sync")
