"""What runs in the engine core's process, and how the controller calls it: rank calls and the pause watchdog.

May import ``engine.worker`` and what is below. Begin with ``ports``.
"""
