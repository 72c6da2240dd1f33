"""Benchmarks: methods and schedules side by side on the same weights, losslessness checked.

``workload`` says what runs, ``systems`` and ``peers`` run it, ``comparison`` measures, and
``results`` is what it found; ``comparison_report`` shows that. ``load_response`` follows one
system under load, ``simulation`` runs policies without a model. Only commands import this.
"""
