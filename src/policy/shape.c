/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/shape.h"

pkv_status pkv_shape_check(const pkv_shape *shape, pkv_error *err) {
  PKV_CHECK_STRUCT(err, shape, pkv_shape);
  PKV_CHECK(err, shape->kv_heads >= 1, PKV_E_INVALID, "shape->kv_heads is %d, at least 1 is needed",
            shape->kv_heads);
  PKV_CHECK(err, shape->query_heads >= 1 && shape->query_heads % shape->kv_heads == 0,
            PKV_E_INVALID, "shape->query_heads is %d, not a multiple of kv_heads %d",
            shape->query_heads, shape->kv_heads);
  PKV_CHECK(err, shape->query_heads / shape->kv_heads <= 32, PKV_E_UNSUPPORTED,
            "shape->query_heads %d over kv_heads %d is %d a KV head, at most 32",
            shape->query_heads, shape->kv_heads, shape->query_heads / shape->kv_heads);
  PKV_CHECK(err, shape->head_dim >= 8 && shape->head_dim <= 256 && shape->head_dim % 8 == 0,
            PKV_E_UNSUPPORTED, "shape->head_dim is %d, possible: multiples of 8 from 8 to 256",
            shape->head_dim);
  PKV_CHECK(err, shape->page_tokens >= 1 && shape->page_tokens <= 1024, PKV_E_UNSUPPORTED,
            "shape->page_tokens is %d, possible: 1 to 1024", shape->page_tokens);
  PKV_CHECK(err, shape->q_len >= 1, PKV_E_INVALID, "shape->q_len is %d, at least 1 is needed",
            shape->q_len);
  PKV_CHECK(err, shape->q_len <= PKV_SHAPE_MAX_Q_LEN, PKV_E_UNSUPPORTED,
            "shape->q_len is %d, at most %d", shape->q_len, PKV_SHAPE_MAX_Q_LEN);
  PKV_CHECK(err, shape->window >= 0, PKV_E_INVALID, "shape->window is %d, negative", shape->window);
  return PKV_OK;
}
