"""A trainer, a rollout worker with vLLM, and an environment on three machines that meet only in a bucket.

Run it with ``python -m examples.three_machines`` (or ``make example-three-machines``); see ``--help``.
"""
