"""``DashboardServer`` serves the page and its document over HTTP, for ``delta-sync dashboard``; it only reads."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from vllm_delta_sync.dashboard.page import harmless_json, live_page, page_headers
from vllm_delta_sync.http_server import SmallHandler, SmallServer, is_loopback

TEXT = "text/plain; charset=utf-8"


class DashboardServer(SmallServer):
    """Serves ``/`` and ``/overview``. Args: overview: returns the page's document; called in threads."""

    def __init__(self, host: str, port: int, overview: Callable[[], dict[str, Any]]) -> None:
        self.overview = overview
        self.loopback = host == "localhost" or is_loopback(host)
        super().__init__(host, port, _Handler)

    @property
    def url(self) -> str:
        """Where to find the page."""
        return f"{super().url}/"


class _Handler(SmallHandler):
    server: DashboardServer

    def do_GET(self) -> None:
        if self._is_foreign():
            self.answer(403, b"pages of other sites may not read this page\n", TEXT, page_headers())
        elif self.path == "/":
            self.answer(200, live_page(), "text/html; charset=utf-8", page_headers())
        elif self.path == "/overview":
            self.answer(200, harmless_json(self.server.overview()), "application/json", page_headers())
        else:
            self.answer(404, b"not found\n", TEXT, page_headers())

    def _is_foreign(self) -> bool:
        """Return whether a page of another site may have sent the request."""
        site, mode = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Mode")
        if site not in ("none", "same-origin") and mode != "navigate":
            return True
        # DNS rebinding: another site's name may be made to resolve to this machine. Host shows the name.
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return True
        return self.server.loopback and host != "localhost" and not is_loopback(host)
