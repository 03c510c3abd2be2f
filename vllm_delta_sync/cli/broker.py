"""``delta-sync broker`` forwards notices between trainers and servers that cannot reach each other."""

import argparse
import logging
import signal
import sys
from pathlib import Path

from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import print_event


@command(
    "broker",
    "forward notices between publishers and servers that both connect to the broker",
    option("--publishers", required=True, metavar="ADDRESS", help="address to bind for publishers"),
    option("--subscribers", required=True, metavar="ADDRESS", help="address to bind for servers"),
    option("--key", type=Path, metavar="PATH", help="the broker's secret certificate; needs both allow-lists"),
    option("--allowed-publishers", type=Path, metavar="DIR", help="public certificates of the allowed publishers"),
    option("--allowed-subscribers", type=Path, metavar="DIR", help="public certificates of the allowed servers"),
)
def broker(options: argparse.Namespace) -> Report:
    r"""Forward notices. Needs no run and no bucket, and stores only the last notice of each run. Ends on Ctrl-C and
    SIGTERM.

    Publishers then send notices to connect:tcp://HOST:5556, and servers subscribe to tcp://HOST:5555. CURVE keys keep
    out everyone else: each allow-list is a directory of public certificates (*.pub), or one file, and is reloaded when
    it changes.

    examples:
      delta-sync broker --publishers tcp://*:5556 --subscribers tcp://*:5555
      delta-sync keygen broker.key --notice
      delta-sync broker --publishers tcp://*:5556 --subscribers tcp://*:5555 \
        --key broker.key --allowed-publishers trainers/ --allowed-subscribers servers/
    """
    from vllm_delta_sync.notice.broker import Broker

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    broker = Broker(
        options.publishers, options.subscribers, options.key, options.allowed_publishers, options.allowed_subscribers
    )
    before = signal.signal(signal.SIGTERM, lambda number, frame: broker.stop())
    # Python runs handlers between bytecodes, so a signal right before the poll would wait for the next notice.
    woken = signal.set_wakeup_fd(broker.wakeup, warn_on_full_buffer=False)
    try:
        bound = {"publishers": broker.publishers, "subscribers": broker.subscribers, "curve": options.key is not None}
        keys = "with CURVE keys" if bound["curve"] else "without keys: any client that reaches the ports may use them"
        text = f"publishers {broker.publishers}, subscribers {broker.subscribers}, {keys}"
        print_event(options, bound, lambda: print(text))
        broker.run()
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        broker.close()
        logging.info("forwarded %d notices, dropped %d messages", broker.passed, broker.dropped)
    return Report()
