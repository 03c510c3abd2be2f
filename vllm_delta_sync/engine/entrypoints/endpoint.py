"""``EndpointPlugin`` is vLLM's endpoint plugin: it adds the routes to an API server, and starts the receiver."""

import asyncio
import threading
from argparse import Namespace
from typing import Any, get_args

from vllm_delta_sync import admin_token
from vllm_delta_sync.engine.compat.version_labels import hide_serials
from vllm_delta_sync.engine.logger import logger, set_format
from vllm_delta_sync.engine.names import PLUGIN_NAME
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.logs import public_url


class EndpointPlugin:
    """Adds the routes under ``/delta_sync``, and starts the receiver."""

    name = PLUGIN_NAME

    @property
    def required_tasks(self) -> tuple[str, ...]:
        """All tasks of a server that has an engine; vLLM loads the plugin if the model supports any of them."""
        from vllm import tasks

        without_engine = getattr(tasks, "FRONTEND_TASKS", ("render",))
        return tuple(task for task in get_args(tasks.SupportedTask) if task not in without_engine)

    def attach_router(self, app: Any) -> None:
        """Add the routes; vLLM calls it while it builds the application."""
        from vllm_delta_sync.engine.api import routes

        routes.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Check the configuration and start to follow. An error ends the server after one log line."""
        set_format()  # here too, for a process that loaded its plugins before the server's settings were set
        try:
            await self._begin(engine_client, state)
        except DeltaSyncError as error:
            # vLLM would print a traceback that hides this line.
            logger.critical("%s: %s; the server exits", error.kind, error.message)
            raise SystemExit(error.exit_code) from None

    async def _begin(self, engine_client: Any, state: Any) -> None:
        from vllm_delta_sync.engine.api import weight_transfer
        from vllm_delta_sync.engine.api.adapters import announce, check_lora, make_adapter, reserve_names
        from vllm_delta_sync.engine.api.api_servers import LeaderElection, find_api_server_group
        from vllm_delta_sync.engine.api.exact_requests import ExactRequests
        from vllm_delta_sync.engine.api.live_page import LivePage
        from vllm_delta_sync.engine.api.shared_objects import SharedObjects
        from vllm_delta_sync.engine.compat.features import check_engine, fit_pause_mode
        from vllm_delta_sync.engine.core.engine_shutdown import fail_when_engine_died, watch_shutdown
        from vllm_delta_sync.engine.core.ports import ServerEnginePort
        from vllm_delta_sync.engine.follow.service import ReceiverService
        from vllm_delta_sync.engine.observe import spans
        from vllm_delta_sync.settings import Settings, load_settings

        settings = fit_pause_mode(load_settings(), engine_client.vllm_config)
        check_engine(engine_client.vllm_config, settings.prefix_cache)
        others = settings.adapters()
        names = [*([] if settings.lora_name is None else [settings.lora_name]), *others]
        models, loop = getattr(state, "openai_serving_models", None), asyncio.get_running_loop()
        check_lora(engine_client.vllm_config, names, models)
        if names:
            reserve_names(models, names)

        turns = threading.Lock()
        group, stopping = find_api_server_group(engine_client), watch_shutdown(engine_client)
        state.delta_sync_has_ended = lambda: stopping.is_set() or engine_client.errored

        def follow(chosen: Settings, exports_metrics: bool = True) -> ReceiverService:
            adapter = None if chosen.lora_name is None else make_adapter(chosen.lora_name)
            port = ServerEnginePort(engine_client, loop, chosen, adapter, turns)
            service = ReceiverService(port, chosen, exports_metrics)
            service.receiver.board.has_ended = state.delta_sync_has_ended
            if adapter is not None:
                announce(models, adapter, service.receiver.board, loop)
            return service

        controller = LeaderElection(lambda: follow(settings), group, stopping)
        state.delta_sync = controller
        state.delta_sync_adapters = {name: follow(chosen, exports_metrics=False) for name, chosen in others.items()}
        state.delta_sync_pages = {None: LivePage(settings), **{name: LivePage(own) for name, own in others.items()}}
        state.delta_sync_token = settings.admin_token()
        state.delta_sync_objects = SharedObjects(settings)
        state.delta_sync_min_version_seconds = settings.min_version_seconds
        if settings.admin_token_file is not None and admin_token.readable_by_others(settings.admin_token_file):
            logger.warning("admin_token_file can be read by other users; run chmod 600 on it")
        fail_when_engine_died(engine_client)
        weight_transfer.install(engine_client, controller, settings.bucket)

        followed = {settings.lora_name: controller, **state.delta_sync_adapters}
        runs = {name: lambda each=each: each.receiver.served_run for name, each in followed.items()}
        spans.install(engine_client, state, runs)
        hide_serials(engine_client)
        exact = state.delta_sync_exact = ExactRequests(
            engine_client, names, settings.lora_name is None, settings.prefix_cache
        )
        exact.install(state)
        await controller.start()
        for service in state.delta_sync_adapters.values():
            service.start()
        logger.info("following %s (policy %s)", public_url(settings.bucket), settings.policy)
