"""Horizontal bars on a logarithmic scale, as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Callable
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, BAR, GAP, TITLE = 760, 220, 90, 16, 6, 34
STYLE = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.ours{fill:#2a6fdb}.peer{fill:#b8bec8}"
DARK = "@media(prefers-color-scheme:dark){text{fill:#ddd}.peer{fill:#5b6370}}"

Panels = list[tuple[str, dict[str, float]]]


def bars(panels: Panels, label: Callable[[float], str], ours: Callable[[str], bool]) -> str:
    """One group of bars for each panel: (title, value by name)."""
    parts: list[str] = []
    y = 0
    for title, values in panels:
        if not values:
            continue
        parts.append(f'<text class="title" x="4" y="{y + 20}">{escape(title)} (logarithmic)</text>')
        y += TITLE
        low, high = min(values.values()) / 2, max(values.values())
        for name, value in values.items():
            share = math.log(value / low) / math.log(high / low)
            length = max(2.0, share * (WIDTH - LEFT - RIGHT))
            kind = "ours" if ours(name) else "peer"
            parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">{escape(label(value))}</text>')
            y += BAR + GAP
        y += 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">'
    return "\n".join([head, f"<style>{STYLE}{DARK}</style>", *parts, "</svg>", ""])
