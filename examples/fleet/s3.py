"""The process that serves S3: the tests' server, which keeps connections open here as stores on a network do.

    python -m examples.fleet.s3

Prints its port; ends with its standard input.
"""

import io
from wsgiref.types import WSGIEnvironment

from tests.support import s3_server


class Handler(s3_server.Handler):
    """HTTP/1.1: otherwise each request would pay for a connection of its own, one round trip more.

    werkzeug closes because an application may leave a part of the body unread, and reads that after its answer; this
    application reads all of it first, so what follows is the next request.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "connection":
            super().send_header(keyword, value)

    def make_environ(self) -> WSGIEnvironment:
        environ: WSGIEnvironment = super().make_environ()
        self.rfile = io.BytesIO()
        return environ

    def run_wsgi(self) -> None:
        requests = self.rfile
        try:
            super().run_wsgi()
        finally:
            self.rfile = requests


if __name__ == "__main__":
    s3_server.Handler = Handler  # type: ignore[misc]
    s3_server.main()
