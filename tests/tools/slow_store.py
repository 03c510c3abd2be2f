"""An S3 store on loopback that machines reach through slow links, as ``examples/three_machines/run.sh`` needs one.

    python -m tests.tools.slow_store BUCKET --mbit 100 --round-trip-ms 50 --link LINK=HOST --forward LINK=HOST:PORT

Opens a port of HOST for each ``--link``, which leads through that link to the store, and for each ``--forward`` one
that leads to HOST:PORT. Prints lines ``NAME=VALUE``: the variables of an S3 client, ``STORE_LINK`` with the URL of each
way to the store, ``FORWARD_LINK`` with that of each other. Serves until its standard input ends.
"""

import argparse
import sys

from tests.support.links import Links
from tests.support.s3_store import serving


def main(arguments: list[str]) -> None:
    """Serve as the module's docstring says."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.slow_store", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("bucket", help="bucket to create")
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s of each link, each way")
    parser.add_argument("--round-trip-ms", type=float, default=50.0, help="of each link")
    parser.add_argument("--link", action="append", default=[], metavar="LINK=HOST", help="a way to the store")
    parser.add_argument("--forward", action="append", default=[], metavar="LINK=HOST:PORT", help="a way elsewhere")
    options = parser.parse_args(arguments)
    with (
        serving(options.bucket, keep_alive=True) as server,
        Links(options.mbit * 1e6, options.round_trip_ms / 1e3) as links,
    ):
        hosts = dict(text.split("=") for text in options.link)
        lines = dict(server.environment)
        for link, host in hosts.items():
            lines[f"STORE_{link}"] = f"http://{host}:{links.forward(link, server.port, host=host)}"
        for text in options.forward:
            link, _, target = text.partition("=")
            host, _, port = target.rpartition(":")
            entry = links.forward(link, int(port), host=hosts[link], target=host)
            lines[f"FORWARD_{link}"] = f"http://{hosts[link]}:{entry}"
        print("\n".join(f"{name}={value}" for name, value in lines.items()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
