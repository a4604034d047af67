# SPDX-License-Identifier: Apache-2.0
"""A decode step with torch tensors, planned and run on the device where there is one.

    python examples/python/torch_decode.py

On a CUDA device nothing is read back to the host: lengths and block table stay there, the planner
is one kernel on the current stream, and plan() and run() can be captured in a CUDA graph.
"""

import sys

import persistentkv as pkv

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16


def device():
    import torch

    if torch.cuda.is_available():
        try:
            return pkv.Executor("cuda").device
        except pkv.NotSupported as e:
            print(f"on the CPU: {e}")
    return "cpu"


def main():
    try:
        import torch
    except ImportError:
        print("torch is not installed: nothing to show")
        return 77
    where = device()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([100, 7, 513, 64], dtype=torch.int32, device=where)
    tables = torch.randperm(4 * 33, generator=generator).int().reshape(4, 33).to(where)
    shape = (4 * 33, 2, KV_HEADS, PAGE, DIM)  # HND
    cache = torch.randn(shape, generator=generator).bfloat16().to(where)
    q = torch.randn((4, HEADS, DIM), generator=generator).bfloat16().to(where)

    decode = pkv.BatchDecode(kv_layout="HND", lse_base="e", max_batch_size=4, max_seq_len=528)
    decode.plan(
        block_tables=tables,
        seq_lens=lengths,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        page_size=PAGE,
        q_data_type=torch.bfloat16,
    )
    out, lse = decode.run(q, cache, return_lse=True)

    row = 2  # against plain attention of one row
    kv = cache[tables[row]].float().permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)[:, :, :513]
    logits = q[row].float().reshape(KV_HEADS, 4, DIM) @ kv[0].transpose(1, 2) / DIM**0.5
    wanted = (logits.softmax(-1) @ kv[1]).reshape(HEADS, DIM)
    error = (out[row].float() - wanted).abs().max().item()
    print(f"{where}: largest difference {error:.1e}, lse {lse[row, 0]:.3f}")
    assert error < 1e-2
    print(decode.explain())
    return 0


if __name__ == "__main__":
    sys.exit(main())
