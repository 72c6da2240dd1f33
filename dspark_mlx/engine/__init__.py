"""The engine: draft, schedule, verify and commit, for all active requests at once.

Read ``engine`` (one step), ``batch`` (the rows being decoded), ``sequence`` (one
request and where it ends), ``prefill`` and ``prefix_cache`` (prompts), ``report``
(what is told of a round).
"""
