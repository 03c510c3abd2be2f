"""Plan the update from the weights held to the wanted version.

May import ``engine.commit`` and what is below. Begin with ``update_planner``; ``trusted_head`` refuses a head that is
older than what was seen before.
"""
