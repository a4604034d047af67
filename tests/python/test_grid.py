# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's tests as a grid of cells: each passes, or is refused by name (grid_cells.py)."""

import grid_cells
import pytest
from py_support import Kind, missing

PAIRS = [cell for suite in grid_cells.suites() for cell in grid_cells.chosen(suite, False)]


def check(cell, name):
    reason = missing(name)
    if reason:
        pytest.skip(reason)
    state, _ = grid_cells.outcome(cell, Kind(name))
    assert (state == "refused") == bool(cell.refusal)


@pytest.mark.parametrize("cell", PAIRS, ids=str)
def test_on_the_cpu(cell):
    check(cell, "numpy")


@pytest.mark.gpu
@pytest.mark.parametrize("cell", PAIRS, ids=str)
def test_on_the_gpu(cell):
    check(cell, "cuda")


@pytest.mark.full
@pytest.mark.parametrize(
    "suite", [s for s, cells in grid_cells.suites().items() if len(cells) < 10000]
)
def test_every_cell_on_the_cpu(suite):
    for cell in grid_cells.chosen(suite, True):
        check(cell, "numpy")


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("suite", list(grid_cells.suites()))
def test_every_cell_on_the_gpu(suite):
    for cell in grid_cells.chosen(suite, True):
        check(cell, "cuda")


def test_pairs_cover_every_two_values():
    cells = grid_cells.product("s", lambda _, **v: tuple(v.values()), a=[1, 2, 3], b="xy", c="uvw")
    cells = [(v, type("C", (tuple,), {"cost": 0})(c)) for v, c in cells]
    chosen = grid_cells.pairs(cells)
    assert len(chosen) < len(cells)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert len({(c[i], c[j]) for c in chosen}) == len({(c[i], c[j]) for _, c in cells})


def test_a_wrong_result_fails_its_cell(monkeypatch):
    cell = next(c for c in PAIRS if not c.refusal and c.check == "reference")
    right = grid_cells._run_decode

    def wrong(inputs):
        decoder, (out, lse) = right(inputs)
        out[0, 0, 0] += 0.01
        return decoder, (out, lse)

    monkeypatch.setattr(grid_cells, "_run_decode", wrong)
    with pytest.raises(AssertionError):
        grid_cells.outcome(cell, Kind("numpy"))
