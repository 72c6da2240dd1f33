"""Benchmarks: methods and schedules side by side on the same weights, losslessness checked.

``runner`` measures, ``result`` is what it found, ``tables`` and ``picture`` show
it. Uses the library from outside, as a script would; nothing imports this but
the command line.
"""
