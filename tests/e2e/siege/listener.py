"""Prints the version of each notice that a subscriber gets: ``python -m tests.e2e.siege.listener FOLDER PORT RUN``."""

import sys
from pathlib import Path

from vllm_delta_sync.notice import NoticeSubscriber, curve


def main(folder: str, port: str, run: str) -> None:
    keys = curve.client_keys(Path(folder, "receiver.curve"), Path(folder, "broker.curve.pub"))
    subscriber = NoticeSubscriber(f"tcp://127.0.0.1:{port}", run, keys)
    while True:
        notice = subscriber.receive(3600)
        if notice is not None:
            print(notice.version, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
