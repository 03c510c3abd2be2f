"""Looking after a run: folded ranges and anchors, retention, tags, branches, leases, repair."""
