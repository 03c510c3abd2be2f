"""All code that patches vLLM or reads its internals, each place with cause, symptom, and when to remove it.

May import ``engine.model``. Begin with ``patches``; its table lists the places in other packages.
"""
