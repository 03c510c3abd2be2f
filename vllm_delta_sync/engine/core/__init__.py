"""What runs in the engine core's process, and how the controller reaches it: calls to ranks, the pause watchdog.

May import ``engine.worker`` and what is below. Begin with ``ports``.
"""
