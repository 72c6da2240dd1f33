"""Textual's compositor, sparing: of each widget only the rows about to be painted are rendered.

Textual renders every widget that shares a scrolled view with a changed one, to
its last visible row: a word more in a reply has the whole chat rendered. What
is overridden is not Textual's public interface: where a later version has it no
more, its own way comes back, which paints the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual._compositor import Compositor
from textual.geometry import Region
from textual.strip import Strip


class SparingCompositor(Compositor):
    def _get_renders(
        self, crop: Region | None = None
    ) -> Iterable[tuple[Region, Region, list[Strip]]]:
        """Each visible widget's region, the part of it that is rendered, and that part's lines.

        ``crop`` encloses what is to be painted; all where it is None.
        """
        for widget, (region, clip) in self.visible_widgets.items():
            part = region.intersection(clip)
            if crop is not None:
                # Rows only: columns cut out would cost more than they spare.
                rows = part.intersection(Region(part.x, crop.y, part.width, crop.height))
                part = rows if rows.overlaps(crop) else Region()
            if part:
                yield region, part, widget.render_lines(part.translate(-region.offset))
