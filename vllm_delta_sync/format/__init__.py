"""The wire format: what bytes in a bucket mean. Arrays and bytes only; no torch, no vllm, no I/O.

The byte-exact specification is docs/FORMAT.md; the modules follow its sections.
"""
