"""What the fields of JSON documents mean: the part of docs/REFERENCE.md that the code does not state."""

from vllm_delta_sync.engine.observe.status import RECENT_COMMITS

STATUS_FIELDS = {
    "run": "id of the run followed, 32 hex digits; null until a run is found",
    "served": "the version of the weights that generate now; null until they are identified",
    "served.version": "its number",
    "served.step": "the trainer's step",
    "served.fingerprint": "32 hex digits, [defined here](FORMAT.md#14-fingerprint)",
    "served.quarantined": "why the publisher's gate refused to have it served; empty for any other version",
    "served.held_back": (
        "null if it is the trainer's exact state; else how far it is from it: `elements` that are held back, "
        "`relative_norm` of their distance, and `exact`, the newest exact version before it"
    ),
    "head": "the newest version seen in the bucket, with the same members; null before the first poll",
    "lag": "number of versions between the served one and the newest that following leads to; null if one is "
    "unknown. A held server does not read the bucket, so there it is the lag of `polled_seconds` ago",
    "state": "one of the [states](#states)",
    "last_error": "the last error; null after the next success",
    "last_error.kind": "one of the [kinds](#errors)",
    "last_error.message": "text for people",
    "policy": "the setting",
    "target": "what is followed: the setting, or what POST /delta_sync/target has named since",
    "ready": "the answer of `GET /delta_sync/ready`",
    "ready.ready": "whether requests may be sent to this server",
    "ready.reasons": "why not: causes with their remedies; empty if they may",
    "holding": "whether new versions wait for POST /delta_sync/release",
    "requested": "whether a request is under way that may lead to another version: sync, release or target",
    "repairable": "whether weights were changed from outside and will be rebuilt from the bucket: soon, or with policy "
    "manual at the next POST /delta_sync/sync",
    "undo": "versions that POST /delta_sync/rollback can revert to, newest first",
    "ranks": "one entry per rank, once the weights have been scanned",
    "ranks[].rank": "its number",
    "ranks[].tensors": "number of tensors of the run",
    "ranks[].unloaded": "the first 64 names of the run's tensors that no rank loads: a tied head, a vision tower",
    "ranks[].derived": (
        "the first 64 names of those that it reads only through derived tensors, see [routes](design/routes.md)"
    ),
    "ranks[].ms": "milliseconds: `trace` (finding the routes) and `scan` (hashing all weights)",
    "role": "of this API server: `leader`, which runs the receiver, or `follower`, which shows the leader's status",
    "server": "number of this API server",
    "servers": "all API servers of this vLLM",
    "servers[].server": "its number",
    "servers[].pid": "its process",
    "servers[].role": "as above",
    "timings_ms": "of the last commit, see [timings](#timings); empty before the first",
    "commits": "changes of the weights served since the start, rollbacks and repairs included; one may advance by "
    "several versions",
    "polls": "polls of the bucket since the start",
    "polled_seconds": "seconds since the last successful poll; null before the first",
    "fleet": "see [fleets](fleet.md)",
    "fleet.receiver": "the setting `receiver_id`",
    "notice": "of the publisher",
    "notice.listens": "whether notices are listened for",
    "notice.heard_seconds": "seconds since the last notice, which publishers repeat; null before the first",
    "store": "requests of controller and ranks to stores since the start, as of the last staging; a plain directory is "
    "not counted",
    "store.calls": "requests; a listing counts once",
    "store.failures": "failed requests; a missing object is not a failure",
    "store.failures_store": "of these: the store is full, or its answer is invalid",
    "store.failures_access": "of these: credentials were refused",
    "store.failures_unavailable": "of these: no answer, or the connection broke",
    "store.failures_deadline": "of these: not completed within the deadline, retries included",
    "store.retries": "tries after the first one",
    "store.sent_bytes": "failed tries included",
    "store.received_bytes": "failed tries included; with a cache, each object once per node",
    "store.peer_bytes": "read from peers instead of the bucket (setting `peer`), before they are verified",
    "store.peer_failures": "times that a peer was given up for a minute; the log names it and the reason",
    "store.send_seconds": "spent in transfers, summed over parallel ones",
    "store.receive_seconds": "spent in transfers, summed over parallel ones",
    "versions": "installed releases",
    "versions.vllm": "null if not installed",
    "versions.torch": "as the server's process has it",
    "versions.vllm_delta_sync": "release of the plugin",
    "versions.tested": "whether it was tested with that vLLM",
    "trust": "null without `trusted_keys`",
    "trust.keys": "first 16 hex digits of each trusted key",
    "trust.last_seen": "the newest state seen; null before the first",
    "trust.last_seen.run": "id of the run",
    "trust.last_seen.version": "newest trusted version",
    "trust.last_seen.manifest": "digest of its manifest",
    "trust.last_seen.kept": "whether it was written to `state_dir`",
    "trust.expires_at": "until when HEAD.json counts as the newest; null if unknown",
    "trust.expired": "whether that time has passed",
    "recent": f"the last {RECENT_COMMITS} commits, oldest first",
    "recent[].versions": "how many versions it applied; 0 for a rollback from the undo log and for a repair",
    "recent[].changed": "changed elements in their deltas; all of the model if one was read or rebuilt whole",
    "recent[].payload_bytes": "bytes of their objects; those that a rebuild reads are not counted",
    "recent[].timings_ms": "as above",
}
"""Members of ``GET /delta_sync/status``."""

TIMINGS = {
    "fetch": "read the version's objects, from the bucket or the cache",
    "verify": "compare their SHA-256 with what the manifest declares",
    "decode": "decode and check them, and merge versions into one",
    "route": "turn changes into addresses of the model's memory, sorted, with half of each hash",
    "rescan": "hash a slice of the weights again (setting `rescan_bytes`)",
    "wait": "from the request to pause until generation is paused; `waited` in the log line",
    "pause": "`wait` + `commit` + `resume`: the longest that generation can have been paused",
    "commit": "patch the weights and hash what changed, including the call to the worker",
    "resume": "label the outputs to come, and resume the engine",
}
"""Keys of ``timings_ms``, in order. Each is the slowest rank's."""

VERIFY_FIELDS = {
    "verdict": "true only if every weight is the served version's, bit for bit",
    "version": "the version compared with",
    "fingerprint": "measured now",
    "expected": "declared by the version's manifest",
    "mismatched": "names of the tensors that differ",
    "chain": "whether the served version is the one that the bucket has now; null if that cannot be read",
    "reason": "why `chain` is false or null, else null",
}
SPAN_FIELDS = {
    "index": "the choice, as in `choices[].index`",
    "version": "version of the weights that sampled these tokens; null before the weights were identified",
    "start": "first token of the span, counted from the choice's first output token",
    "end": "one past its last token",
}
RESULT_SECONDS = {
    "diff": "compare with the previous version; `publish` returns after it",
    "encode": "in the background: encode the objects",
    "upload": "in the background: write objects, manifest and head, and send the notice",
    "total": "from the call until the version was durable",
}
