"""The charts: each a function of the statistics and a size in cells.

Pure functions. Every time line shows the same rounds (two in each cell, the newest at the right),
shares run from 0 to 100 %, lengths from 0 to the block, so that charts can be compared with each
other and over time. The first row is the title. ``timelines`` shows what changes over the rounds,
``scheduling`` what the scheduler measures and decides, ``gauges`` the state at this moment,
``draft_strip`` one round; ``axes`` has the parts that all of them are drawn with.
"""

from collections.abc import Callable

from dspark_mlx.stats import EngineStats

from ..canvas import Canvas

Draw = Callable[[EngineStats, int, int], Canvas]
