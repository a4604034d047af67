/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised matrices as dense_pack.h lays them out, made on the host. */
#include "backend/cuda/dense_pack.h"

#include "backend/cuda/dense_launchers.h"

size_t pkv_dense_quant_bytes(pkv_wtype type, int64_t n, int64_t k) {
  const pkv_pack_layout l = pkv_pack_layout_of(type);
  if (l.cell_bytes == 0 || n < 1 || k < 1 || k % l.block_k != 0) return 0;
  const int64_t strips = (n + PKV_PACK_ROWS - 1) / PKV_PACK_ROWS;
  return (size_t)(strips * pkv_pack_strip(&l, k));
}

void pkv_dense_quant_pack(void *to, const pkv_weight *host, int64_t rows_total, int64_t first_row) {
  const pkv_pack_layout l = pkv_pack_layout_of(host->type);
  const int64_t strip_bytes = pkv_pack_strip(&l, host->k);
  const int64_t blocks = host->k / 32, room = strip_bytes / l.cell_bytes * (l.cell_k / 32);
  const int64_t end = first_row + host->n;
  /* rows that fill up the last strip belong to whoever brings the last row */
  const int64_t padded = end == rows_total ? (end + PKV_PACK_ROWS - 1) / PKV_PACK_ROWS * 8 : end;
  for (int64_t row = first_row; row < padded; row++) {
    unsigned char *const strip = (unsigned char *)to + row / PKV_PACK_ROWS * strip_bytes;
    const unsigned char *const from =
        row < end ? (const unsigned char *)host->data + (row - first_row) * host->row_bytes : NULL;
    for (int64_t b = 0; b < room; b++)
      pkv_pack_block(strip, host->type, &l, b < blocks ? from : NULL,
                     (int32_t)(row % PKV_PACK_ROWS), b);
  }
}
