# SPDX-License-Identifier: Apache-2.0
"""Attention over a prefix and over the rest, merged exactly: the result of attending to both.

python examples/python/shared_prefix.py
"""

import numpy as np
import persistentkv as pkv

HEADS, KV_HEADS, DIM, PAGE, ROWS = 8, 2, 64, 16, 4


def main():
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 64, KV_HEADS, PAGE, DIM)).astype(np.float16)  # pages, HND
    prefix = np.arange(20, dtype=np.int32)  # 320 tokens that all rows share
    own = np.arange(20, 20 + 2 * ROWS, dtype=np.int32).reshape(ROWS, 2)  # up to 32 of their own
    rest = np.array([3, 17, 32, 20], np.int32)
    q = rng.standard_normal((ROWS, HEADS, DIM)).astype(np.float16)
    shape = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
    decode = pkv.BatchDecode(kv_layout="HND")

    def attend(tables, lengths):
        decode.plan(block_tables=tables, seq_lens=lengths, o_data_type="float32", **shape)
        return decode.run(q, (k, v), return_lse=True)

    common = np.tile(prefix, (ROWS, 1))
    whole, _ = attend(np.hstack([common, own]), rest + 320)
    out_a, lse_a = attend(common, np.full(ROWS, 320, np.int32))
    out_b, lse_b = attend(own, rest)
    merged, _ = pkv.merge_state(out_a, lse_a, out_b, lse_b)
    print(f"largest difference: {np.abs(merged - whole).max():.1e}")
    assert np.abs(merged - whole).max() < 1e-5


if __name__ == "__main__":
    main()
