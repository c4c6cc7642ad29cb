"""Success curves as SVG: one line per variant with its interval. Only this module imports matplotlib.

The colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from horizonrl.ops.studies.comparison import Band

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours except yellow, which is hard to see on white."""
DASHES = ("-", "--", ":")
PANELS_A_ROW = 2
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "svg.hashsalt": "horizonrl",  # makes the file's bytes reproducible
}


def plot_success(
    panels: Mapping[str, Mapping[str, Band]],
    order: Sequence[str],
    x_label: str,
    legend_title: str,
    file: Path,
) -> None:
    """Draw one panel per entry with one line per band, of which the legend has those that are drawn, in their order.

    A name has the same colour and dash in all panels.
    """
    names = [name for name in order if any(name in lines for lines in panels.values())]
    looks = dict(
        zip(
            names,
            [(colour, dash) for dash, colour in product(DASHES, COLOURS)] * len(names),
            strict=False,
        )
    )
    columns = min(PANELS_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns + 1.8, 3.2 * rows + 0.3), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
            for name, band in lines.items():
                colour, dash = looks[name]
                axes.plot(
                    band.places, band.mean, color=colour, linestyle=dash, linewidth=1.8, label=name
                )
                axes.fill_between(
                    band.places, band.low, band.high, color=colour, alpha=0.13, linewidth=0
                )
            axes.set_title(title, fontsize="medium")
            axes.set_axisbelow(True)
        grid[0, 0].set_ylim(bottom=0)
        grid[0, 0].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
        grid[0, 0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        grid[0, 0].xaxis.set_major_formatter(EngFormatter(sep=" "))
        # The lowest of each column.
        for axes in grid.flat[max(0, len(panels) - columns) : len(panels)]:
            axes.set_xlabel(x_label)
            axes.tick_params(labelbottom=True)
        for axes in grid[:, 0]:
            axes.set_ylabel("success")
        handles = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
        figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside right upper",
            title=legend_title,
            alignment="left",
            frameon=False,
        )
        # Without a date, so that equal results give equal files.
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
