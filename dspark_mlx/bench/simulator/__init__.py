"""Policies on recorded or synthetic replies and cost tables: a benchmark in milliseconds.

Read ``reply_trace`` (what a drafter would propose at every position of a reply),
``tables`` (cost tables) and ``simulate`` (serve replies with a policy).
"""
