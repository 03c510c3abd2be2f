"""Every place that patches vLLM or reads its internals, each with cause, symptom, and when it can go.

May import ``engine.model``. Begin with ``patches``; its table lists the touch points that live elsewhere.
"""
