# SPDX-License-Identifier: Apache-2.0
"""Decode a few steps of one layer with NumPy: a paged cache, a block table, append, attend.

python examples/python/paged_decode.py
"""

import numpy as np
import persistentkv as pkv

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 64, 16, 64


def main():
    rng = np.random.default_rng(0)
    cache = np.zeros((PAGES, 2, PAGE, KV_HEADS, DIM), np.float16)  # K and V of every page (NHD)
    free = list(range(PAGES))
    lengths = np.array([5, 40, 0], np.int32)  # tokens that each row has already
    tables = np.full((3, 8), -1, np.int32)
    for row, length in enumerate(lengths):
        for i in range(-(-length // PAGE)):
            tables[row, i] = free.pop()

    decode = pkv.BatchDecode(kv_layout="NHD")
    for step in range(3):
        # A new token a row: its page and its slot there.
        slots = np.empty(3, np.int64)
        for row, at in enumerate(lengths):
            if at % PAGE == 0:
                tables[row, at // PAGE] = free.pop()
            slots[row] = int(tables[row, at // PAGE]) * PAGE + at % PAGE
        lengths += 1
        k, v = rng.standard_normal((2, 3, KV_HEADS, DIM), np.float32)
        pkv.append(k, v, cache, slots)

        # One plan a step serves all layers of this shape; lengths count the new token.
        decode.plan(
            block_tables=tables,
            seq_lens=lengths,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            page_size=PAGE,
        )
        q = rng.standard_normal((3, HEADS, DIM)).astype(np.float16)
        out, lse = decode.run(q, cache, return_lse=True)  # lse in base 2
        print(f"step {step}: out {out.shape}, lse of row 0 {lse[0, 0]:.3f}")
    print(decode.explain())


if __name__ == "__main__":
    main()
