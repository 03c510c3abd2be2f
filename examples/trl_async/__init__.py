"""TRL's AsyncGRPOTrainer against a live vLLM server that takes the trainer's weights from a bucket.

Run it with ``python -m examples.trl_async`` (or ``make example-trl``); see ``--help``.
"""
