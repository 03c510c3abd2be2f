"""``remedy_of`` says what an operator does about an error, by its kind; its message says what is wrong."""

WAIT_FOR_STORE = "Wait: it is retried. If it stays, check the network and the store: delta-sync doctor --bucket URL."
VERIFY = "Find the damage with delta-sync verify --bucket URL, and repair it with delta-sync repair --bucket URL."
RESTART = "Restart the server; it identifies its weights and follows again."
REPORT = "See the server's log. If it comes back, report it with the log."
TRUST = "Find out who wrote it. If the key is a new one of yours, add its public key file to trusted_keys."

REMEDIES = {
    "access": "Renew the credentials, or give them the right that the message names.",
    "base": "Give the checkpoint that the run started from: base=, --base, or the server's model folder.",
    "busy": "Try again; another action is in progress, or nothing is served yet.",
    "chain": "Compare the run with the server's base checkpoint, or find the damage: delta-sync verify --bucket URL.",
    "conflict": "Another publisher or command writes this run. End one of them.",
    "deadline": WAIT_FOR_STORE,
    "digest": VERIFY,
    "drain": "Requests in flight did not end in time. Raise the setting wait_seconds, or use another pause_mode.",
    "engine": REPORT,
    "expired": "Start the publisher again, or set this machine's clock. The served version stays.",
    "fingerprint": "Find out what else wrote the weights. The server rebuilds them from the bucket.",
    "fleet_late": "See the receivers below: one lags, or has ended.",
    "forbidden": "Set DELTA_SYNC_ADMIN_TOKEN to the token of that server.",
    "fork": TRUST,
    "format": VERIFY,
    "gate": "See why training left the bounds of the update gate; the next sound version is served.",
    "held_blocks": "Requests wait for a KV connector or for input. If this stays, set prefix_cache to salt.",
    "incomplete": "The command printed what is left; correct that, and run it again.",
    "late": "See the lag and the last error of the server; then wait, or ask another server.",
    "limit": "No setting raises a limit of the format. Do what the message says; if the data are not yours, find out "
    "who wrote them.",
    "memory": "Free memory on the server, or lower the setting undo_bytes.",
    "model": "Start vLLM from the checkpoint that the run was published from.",
    "not_found": "Start the publisher, correct the URL, or restore what is missing.",
    "notice": "Correct the address or the keys for notices. Without notices, the server polls.",
    "overdue": "The update continues; see the state below.",
    "pause_expired": "The pause took too long and was ended. See the server's log for what blocked it.",
    "publish": "See the trainer's log.",
    "publish_timeout": "The publisher goes on in the background. If this stays, check the network and the store.",
    "replay": TRUST,
    "settings": "Correct the setting that the message names.",
    "signature": TRUST,
    "store": WAIT_FOR_STORE,
    "tensor": "Publish the tensors that the server loads: the same names, shapes and dtypes.",
    "transfer": "Correct the call as the message says. The served version stays.",
    "unavailable": WAIT_FOR_STORE,
    "unreachable": "An operator has to act first, as the message says.",
    "unsupported": "Upgrade vllm-delta-sync on the reader.",
    "usage": "Correct the request as the message says.",
    "version": "Ask for the version that is served now, or ask another server.",
    "weights_lost": RESTART,
}
"""By kind of error; one for each kind that exists."""


def remedy_of(kind: str) -> str:
    """Return what to do about an error of a kind; general advice for an unknown one, which newer releases may send."""
    return REMEDIES.get(kind, REPORT)
