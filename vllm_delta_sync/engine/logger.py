"""``logger`` redacts secrets. It is a child of vLLM's logger, which is the only logger with a handler."""

import logging
import sys

from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.logs import guarded_logger, log_as_json
from vllm_delta_sync.settings import client_settings

logger = guarded_logger("vllm.delta_sync")


def set_format() -> None:
    """Write JSON lines in this process if the setting ``log_format`` says so, to the stream of vLLM's own."""
    try:
        settings = client_settings()
    except SettingsError:
        return  # reported where the settings are used
    if settings.log_format == "json":
        handlers = logging.getLogger("vllm").handlers
        streams = [handler.stream for handler in handlers if isinstance(handler, logging.StreamHandler)]
        log_as_json(logger.name, "vllm_delta_sync", stream=streams[0] if streams else sys.stderr)
