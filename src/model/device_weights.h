/* SPDX-License-Identifier: Apache-2.0 */
/* A model's weights in a device's memory: uploaded once, in the types that its kernels take. */
#ifndef PKV_MODEL_DEVICE_WEIGHTS_H
#define PKV_MODEL_DEVICE_WEIGHTS_H

#include "backend/device_dense.h"
#include "model/model.h"

/* Pointers are the device's; NULL where the family has none. Products of the same rows are one
   matrix: q, k, v; gate, up. */
typedef struct pkv_device_layer {
  pkv_weight qkv, o, gate_up, down;
  pkv_weight qkv_rest; /* the last parts of q, k, v, where their type is another one; else n = 0 */
  const float *attn_norm, *ffn_norm; /* [width] */
  const float *qkv_bias;             /* [q + 2 kv] or NULL */
  const float *o_bias, *q_norm, *k_norm, *attn_post_norm, *ffn_post_norm;
} pkv_device_layer;

typedef struct pkv_device_weights {
  pkv_executor *executor;
  pkv_allocator allocator;
  pkv_dtype act; /* of activations and of weights that are not quantised */
  void *memory;
  size_t bytes;
  pkv_weight embed, output; /* output of a rank without a head: not used */
  const float *output_norm;
  const double *frequency; /* [tables, rope_dim / 2] */
  pkv_device_layer *layers;
  int32_t layer_count;
  int32_t rows; /* as weight_type takes it */
} pkv_device_weights;

/* rows: that decode together at most. Quantised weights are written out where that makes their
   steps faster and leaves `keep` bytes of the device. E_NOMEM says how much is missing for the
   weights alone. The model may be closed afterwards. */
pkv_status pkv_device_weights_create(pkv_device_weights **out, const pkv_model *model,
                                     pkv_executor *executor, int32_t rows, size_t keep,
                                     const pkv_allocator *allocator, pkv_error *err);
/* Bytes that are free on the device now. */
pkv_status pkv_device_weights_room(size_t *bytes, const pkv_device_weights *weights,
                                   pkv_error *err);
void pkv_device_weights_destroy(pkv_device_weights *weights);

#endif
