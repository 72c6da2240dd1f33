"""Training a drafter: from prompts to a checkpoint that ``--drafter`` takes.

Read ``data`` (what a sample is), ``rollout`` (the target's own answers),
``vocab`` (the hot vocabulary), ``init`` (from the target's layers), ``features``
(what the frozen target says about a sample), ``blocks`` (anchors and targets),
``loss`` (the paper's section 3.3), ``trainer`` (steps, checkpoints, resuming),
``validate`` and ``progress`` (what a person sees).
"""
