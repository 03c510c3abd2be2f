"""Choose how to get from the weights that are held to the version that is wanted.

May import ``engine.commit`` and what is below. Begin with ``update_planner``; ``trusted_head`` refuses a head that is
older than what was seen before.
"""
