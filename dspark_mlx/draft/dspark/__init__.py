"""The DSpark drafter: what a checkpoint holds, how a block is drafted, how it is loaded.

Read ``config`` (shapes), ``backbone`` (the parallel block), ``heads`` and
``confidence`` (what runs left to right), ``network`` (all of it), ``pairing``
(does it fit a target), ``load_drafter`` and ``save`` (checkpoints).
"""
