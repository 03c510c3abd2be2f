"""The controller that follows a run: poll, plan, stage, commit, report.

``service`` is its one thread, ``receiver`` what the thread drives. May import ``engine.observe`` and what is below.
Begin with ``receiver``.
"""
