"""What fields of JSON documents mean: the part of docs/REFERENCE.md that the code does not say."""

from vllm_delta_sync.engine.status import RECENT_COMMITS

STATUS_FIELDS = {
    "run": "id of the run followed, 32 hex digits; null until one is found",
    "served": "the version whose weights answer now; null until it is proven",
    "served.version": "its number",
    "served.step": "the trainer's step",
    "served.fingerprint": "32 hex digits, [defined here](FORMAT.md#14-fingerprint)",
    "served.quarantined": "why the publisher's gate found it unfit to be served; empty for any other",
    "head": "the newest version seen in the bucket, with the same members; null before the first look",
    "lag": "versions from the served one to the newest that following leads to; null where one of them is",
    "state": "one of the [states](#states)",
    "last_error": "what went wrong last; null once an attempt has succeeded",
    "last_error.kind": "one of the [kinds](#errors)",
    "last_error.message": "for people",
    "policy": "the setting",
    "target": "the setting",
    "holding": "whether new versions are left alone until POST /delta_sync/release",
    "undo": "versions that POST /delta_sync/rollback can go back to, newest first",
    "ranks": "one entry per rank, once the weights have been looked at",
    "ranks[].rank": "its number",
    "ranks[].tensors": "tensors of the run",
    "ranks[].unloaded": "names of the run's tensors that the model does not load, such as a tied head",
    "ranks[].ms": "milliseconds: `trace` (finding the routes) and `scan` (hashing all weights)",
    "timings_ms": "of the last commit, see [timings](#timings); empty before the first",
    "commits": "commits since the start; one may take several versions",
    "looks": "how often the bucket was looked into since the start",
    "trust": "null without `trusted_keys`",
    "trust.keys": "first 16 hex digits of each trusted key",
    "trust.key_file": "`sequence` of keys.json; null if there is none",
    "trust.mark": "the newest that was seen; null before anything was",
    "trust.mark.run": "id of the run",
    "trust.mark.keys": "`sequence` of keys.json, 0 without",
    "trust.mark.version": "newest version believed",
    "trust.mark.manifest": "digest of its manifest",
    "trust.mark.kept": "whether that could be written to `state_dir`",
    "trust.expires_at": "until when HEAD.json says that it may be taken for the newest; null where that is not known",
    "trust.expired": "whether that is over",
    "recent": f"the last {RECENT_COMMITS} commits, oldest first",
    "recent[].versions": "versions that were folded into the commit; it ends at `version`",
    "recent[].changed": "elements that they carried",
    "recent[].payload_bytes": "bytes of their objects",
    "recent[].timings_ms": "as above",
}
"""Members of ``GET /delta_sync/status``."""

TIMINGS = {
    "fetch": "reading the version's objects from the bucket, and their SHA-256",
    "decode": "decoding them, checking what they contain, and folding versions into one",
    "route": "turning changes into one patch per destination, sorted by address",
    "rescan": "gathering and hashing a share of the weights again (setting `rescan_bytes`)",
    "wait": "from asking the engine to pause until it has",
    "commit": "patching the weights and hashing what changed; includes the call into the worker",
    "resume": "labelling the outputs to come, and letting the engine go on",
    "pause": "`wait` + `commit` + `resume`: how long generation stood still, at most",
}
"""Keys of ``timings_ms``, in order. Each is the slowest rank's."""

VERIFY_FIELDS = {
    "verdict": "true only if every weight is the served version's, bit for bit",
    "version": "the version compared with",
    "fingerprint": "measured now",
    "expected": "declared by the version's manifest",
    "mismatched": "names of the tensors that differ",
    "chain": "whether the version served is the one that the bucket has now; null if that cannot be read",
    "reason": "why `chain` is false or null, else null",
}
SPAN_FIELDS = {
    "index": "the choice, as in `choices[].index`",
    "version": "version of the weights that sampled these tokens; null before one was proven",
    "start": "first token of the span, counted from the choice's first output token",
    "end": "one past its last token",
}
RESULT_SECONDS = {
    "diff": "comparing with the version before; `publish` returns after it",
    "encode": "in the background: making the object's bytes",
    "upload": "in the background: object, manifest, head, notice",
    "total": "from the call until the version was durable",
}
