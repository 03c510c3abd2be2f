"""The controller that follows a run: poll, plan, stage, commit, report.

``service`` is the one thread, ``receiver`` the logic that it drives, ``updater`` what changes weights. May import
``engine.observe`` and what is below. Begin with ``receiver``.
"""
