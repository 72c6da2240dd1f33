"""The charts: each a function of the live state and a size in cells.

Pure. Every time line shows the same rounds (two a cell, the newest at the
right), shares run from 0 to 100 %, lengths from 0 to the block, so that charts
can be compared with each other and over time. The first row is the title.
``timelines`` has what changes over the rounds, ``scheduling`` what the scheduler
goes by and decides, ``gauges`` what is so at this moment, ``axes`` what all of
them are drawn with.
"""

from collections.abc import Callable

from ..canvas import Canvas
from ..state import LiveState

Draw = Callable[[LiveState, int, int], Canvas]
