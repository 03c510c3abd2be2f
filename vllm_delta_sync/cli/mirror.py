"""``delta-sync mirror``, which the package ``cache`` does."""

import argparse
import signal
import sys
from pathlib import Path

from vllm_delta_sync.cli.arguments import BUCKET, bucket_url, count, positive_bytes, without_mirror
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import clean, print_event, size
from vllm_delta_sync.errors import UsageError


@command(
    "mirror",
    "fetch each object of a run once, and serve it to the servers of a site",
    BUCKET,
    option("--host", default="0.0.0.0", metavar="ADDRESS", help="to listen at (default: 0.0.0.0)"),
    option("--port", type=count, default=8643, metavar="N", help="to listen at; 0: any free one (default: 8643)"),
    option("--to", type=Path, metavar="DIR", help="directory of the cache; default: cache_dir, see the settings"),
    option("--max-bytes", type=positive_bytes, metavar="SIZE", help="largest size of the cache; default: cache_bytes"),
)
def mirror(options: argparse.Namespace) -> Report:
    """Serve the objects of a run from a cache, and fetch what is missing from the bucket, once for all who ask. Ends on
    Ctrl-C and SIGTERM.

    Servers and other readers at the same site ask it before the bucket if their setting peer names it. They check every
    object and read documents, such as manifests, from the bucket; so the mirror need not be trusted, and may be stopped
    at any time. Set the same admin token here and there (admin_token_file or DELTA_SYNC_ADMIN_TOKEN): only its holders
    get an object, and only one whose digest they name.

    examples:
      delta-sync mirror --bucket s3://weights/runs/a --to /var/cache/runs
      delta-sync serve /models/base --bucket s3://weights/runs/a --peer http://mirror:8643
    """
    from vllm_delta_sync.bucket import open_bucket
    from vllm_delta_sync.cache.folder import CacheFolder
    from vllm_delta_sync.cache.object_server import ObjectServer
    from vllm_delta_sync.cache.peer_server import PeerServer

    url, store, settings = bucket_url(options), without_mirror(options), options.settings
    bucket = options.closing.enter_context(open_bucket(url, store))
    folder, token = options.to or settings.cache_folder(), settings.admin_token()
    if token is None:
        raise UsageError(
            "a mirror serves only holders of the run's token: set admin_token_file or DELTA_SYNC_ADMIN_TOKEN, to the "
            "same as on the servers"
        )
    limit = options.max_bytes or settings.cache_bytes
    if folder is None or limit == 0:
        raise UsageError("there is no cache to serve: name a directory with --to, and set cache_bytes above 0")

    try:
        CacheFolder(folder, 0).prepare()
    except OSError as error:
        raise UsageError(f"the cache {str(folder)!r}: {error.strerror}; name another directory with --to") from error

    def fetched(digest: str, count: int, seconds: float) -> None:
        row = {"object": digest, "bytes": count, "seconds": round(seconds, 3)}
        print_event(options, row, lambda: print(f"fetched {digest}, {size(count)} in {seconds:.1f} s"))

    objects = ObjectServer(folder, limit, lambda: bucket, token, fetched)
    server = PeerServer(options.host, options.port, objects)
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        row = {"url": server.url, "cache": str(folder)}
        print_event(options, row, lambda: print(clean(f"serving objects at {server.url} from {folder}")))
        server.serve_forever()
    finally:
        server.server_close()
        print_event(options, {"served_bytes": server.served}, lambda: print(f"served {size(server.served)}"))
    return Report()
