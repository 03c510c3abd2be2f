"""``python -m tests.support.hub_store --folder F [--port 0] [--token T] …``: serve a Hub on loopback.

With --attached it ends with its standard input.
The first line printed is JSON: {"endpoint": "http://127.0.0.1:PORT"}.
"""

import argparse
import json
import os
import sys
import threading
from dataclasses import fields
from pathlib import Path

from tests.support.hub_store.access import Options
from tests.support.hub_store.server import Server


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.support.hub_store", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--attached", action="store_true", help="end when the standard input does")
    for field in fields(Options):
        kind = str if field.default is None else type(field.default)
        made = (lambda text: text.lower() in ("1", "true")) if kind is bool else kind
        parser.add_argument("--" + field.name.replace("_", "-"), type=made, default=field.default)
    given = vars(parser.parse_args())
    folder, port, attached = given.pop("folder"), given.pop("port"), given.pop("attached")
    server = Server(folder, port, Options(**given))
    if attached:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    print(json.dumps({"endpoint": server.endpoint}), flush=True)
    server.run()


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


main()
