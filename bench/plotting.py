# SPDX-License-Identifier: Apache-2.0
"""What the drawings of attention files have in common. Needs matplotlib."""


def begin(width):
    """(figure, axes), without a display; an SVG has the same bytes each time."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "persistentkv"
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, 4.6))


def end(figure, axes, what, row, out):
    """Legend and title, `row` one of the file's, and the file `out`."""
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{what}, {row['device']}, {row.get('setup') or 'f16'}; commit "
                   f"{row['commit']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=160, metadata={"Date": None} if out.endswith(".svg") else None)
