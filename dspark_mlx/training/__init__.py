"""Training a drafter: from prompts to a checkpoint that ``--drafter`` takes.

In the order of a run: ``rollout`` (the target answers the prompts), ``data`` (answers become
token sequences), ``new_drafter`` and ``initial_weights`` (the drafter before its first step),
``features`` (hidden states of the frozen target), ``blocks`` (anchors and labels), ``loss``
(section 3.3 of the paper), ``step`` (one optimiser step), ``validate``, ``trainer`` (the loop),
``checkpoint`` (resuming), ``run_log`` (what a person sees), ``run`` (all of it). ``rounds`` plays
the finished drafter for ``dspark eval`` and ``dspark calibrate``.
"""
