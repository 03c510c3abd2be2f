"""``delta-sync broker``: where notices pass through when trainer and servers cannot reach each other."""

import argparse
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from vllm_delta_sync.cli.arguments import Answer, Command, add_json

EXAMPLES = """\
Publishers then announce on connect:tcp://HOST:5556, servers listen at tcp://HOST:5555. With CURVE keys nobody else gets
in: each allow-list is a directory of public certificates (*.pub), or one file, and is read again when it changes.

examples:
  delta-sync broker --publishers tcp://*:5556 --subscribers tcp://*:5555
  delta-sync keygen broker.key --notice
  delta-sync broker --publishers tcp://*:5556 --subscribers tcp://*:5555 \\
    --key broker.key --allowed-publishers trainers/ --allowed-subscribers servers/
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """The subcommand."""
    broker = commands.add_parser(
        "broker",
        help="pass notices on between publishers and servers that both connect to here",
        description="Pass notices on. Needs no run and no bucket, and keeps nothing but the last notice of each run. "
        "Ends on Ctrl-C and SIGTERM.",
        epilog=EXAMPLES,
    )
    broker.add_argument("--publishers", required=True, metavar="ADDRESS", help="bind here for those who announce")
    broker.add_argument("--subscribers", required=True, metavar="ADDRESS", help="bind here for those who listen")
    broker.add_argument("--key", type=Path, metavar="PATH", help="own secret certificate; needs both allow-lists")
    broker.add_argument(
        "--allowed-publishers", type=Path, metavar="DIR", help="public certificates of who may announce"
    )
    broker.add_argument("--allowed-subscribers", type=Path, metavar="DIR", help="public certificates of who may listen")
    add_json(broker)


def _broker(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.notice.broker import Broker

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    broker = Broker(
        options.publishers, options.subscribers, options.key, options.allowed_publishers, options.allowed_subscribers
    )
    before = signal.signal(signal.SIGTERM, lambda number, frame: broker.stop())
    # Handlers run between two steps of Python: a signal that came just before the poll would wait for the next notice.
    woken = signal.set_wakeup_fd(broker.wakeup, warn_on_full_buffer=False)
    try:
        bound = {"publishers": broker.publishers, "subscribers": broker.subscribers, "curve": options.key is not None}
        if options.json:
            print(json.dumps(bound), flush=True)
        else:
            keys = "with CURVE keys" if bound["curve"] else "without keys: whoever reaches the ports may use them"
            print(f"publishers {broker.publishers}, subscribers {broker.subscribers}, {keys}", flush=True)
        broker.run()
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        broker.close()
        logging.info("passed %d notices on, dropped %d messages", broker.passed, broker.dropped)
    # All is said: the addresses had to be known at once.
    return {}, lambda: None


COMMANDS: dict[str, Command] = {"broker": _broker}
