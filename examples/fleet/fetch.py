"""A machine that fetches a full checkpoint into a file, over its own link: the other half of full-weight sync.

    python -m examples.fleet.fetch BUCKET_URL KEY FILE [put]

Writes a line when it is ready, fetches when it is sent one, and writes when it had all of it, by the monotonic clock.
With ``put`` it stores the file instead.
"""

import json
import sys
import time
from pathlib import Path

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import DeltaSyncError

PUT = "put"


def main(arguments: list[str]) -> None:
    """Fetch or store one object as the module's docstring says."""
    url, key, file = arguments[0], arguments[1], Path(arguments[2])
    with open_bucket(url) as bucket:
        print(json.dumps({"event": "ready"}), flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        if PUT in arguments[3:]:
            bucket.put(key, file)
        else:
            bucket.get_file(key, file)
        print(json.dumps({"event": "fetched", "began": began, "at": time.monotonic()}), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DeltaSyncError as error:
        sys.exit(f"fetch: {error}")
