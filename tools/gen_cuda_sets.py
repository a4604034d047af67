#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the thin files that instantiate the decode kernels: one a K/V type and head dimension."""
import pathlib

ROOM = pathlib.Path(__file__).resolve().parent.parent / "src" / "backend" / "cuda"
TEXT = """/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: {kv} K and V, head_dim up to {hd}. */
#include "backend/cuda/decode_launch.cuh"

PKV_CUDA_DECODE_SET(pkv_cuda_decode_{kv}_{hd}, pkv_kv_{kv}, {hd})
"""

SHARED = """/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: route shared, {kv} K and V, head_dim {hds}. */
#include "backend/cuda/shared_launch.cuh"

PKV_CUDA_SHARED_SET{which}(pkv_cuda_shared_{kv}, pkv_kv_{kv})
"""

for kv, hds, which in (("f16", "64 and 128", ""), ("bf16", "64 and 128", ""),
                       ("e4m3", "128", "_128")):  # fmt: skip
    (ROOM / f"shared_{kv}.cu").write_text(SHARED.format(kv=kv, hds=hds, which=which))
for kv in ("f16", "bf16", "e4m3"):
    for hd in (64, 128, 256):
        (ROOM / f"decode_{kv}_{hd}.cu").write_text(TEXT.format(kv=kv, hd=hd))
