"""Reinforcement learning against a live vLLM server that follows the trainer's weights through a bucket.

Run it with ``python -m examples.demo`` (or ``make demo``); see ``--help``.
"""
