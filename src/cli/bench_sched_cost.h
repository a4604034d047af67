/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a step takes on a device, for `pkv bench sched --simulate`. The constants are those of a
 * profile (of "h200" those of attention are fitted, by bench/fit_l2.py), and the model is
 *
 *   decode    step base + max(weights / bandwidth, GEMM flops / GEMM rate) + attention
 *   attention layers * (read latency + row time * rows) + one of
 *     ordinary  max(products / rate, reading): all rows read all their tokens. Reading takes
 *               (through^p + missed^p)^(1/p), p being `overlap` (1: one after the other), for
 *               all bytes at the rate of L2 and those that it does not hold at the rate of
 *               memory, which is such that bytes read once take bytes / bandwidth. How much of
 *               what is read again L2 holds, the load says (bench_sched_reuse.h finds it); where
 *               it does not, L2 / shared bytes of a layer = c is taken: min(1, c), or for a
 *               profile with `parts` c - c ln c, as if each row came at any time, and all with no
 *               more segments than parts
 *     shared    products / rate + unique / bandwidth: what rows share is read once
 *   prefill   GEMM flops of the new tokens / GEMM rate + their attention products / rate, in the
 *             step, before the decode
 */
#ifndef PKV_CLI_BENCH_SCHED_COST_H
#define PKV_CLI_BENCH_SCHED_COST_H

#include "base/status.h"

typedef struct sched_device {
  char name[64];
  double read_tb_s, read_us; /* from memory; latency of one read, a layer */
  double l2_mb, l2_tb_s;
  double step_us; /* a step's time apart from weights and attention */
  double gemm_tflops, attention_tflops;
  double cache_gb; /* for the KV cache */
  double row_us, overlap;
  double parts;  /* equal ones that a plan cuts a batch into; 0 = not known */
  double spread; /* of their speeds: the slowest takes 1 + 2 * spread of the fastest one's time */
} sched_device;

typedef struct sched_shape {
  const char *name;
  int32_t layers, query_heads, kv_heads, head_dim;
  double parameters; /* read in a step */
} sched_shape;

#define SCHED_SHAPES 5
extern const sched_shape sched_shapes[SCHED_SHAPES];

typedef enum sched_route { SCHED_ORDINARY = 0, SCHED_SHARED = 1 } sched_route;
#define SCHED_ROUTES 2
const char *sched_route_name(int32_t route);

/* "h200", "h200-fa3", "rtx6000-ada", or a JSON file with the struct's fields; where they are not
   named row_us, parts and spread are 0, overlap is 1. E_FORMAT names the field. */
pkv_status sched_device_load(sched_device *out, const char *name, pkv_error *err);

/* A batch, in tokens of the KV cache. */
typedef struct sched_load {
  double rows, total, unique;
  double shared; /* those of `unique` that more than one row has */
  double held;   /* share of total - unique that comes from L2; < 0 = to be estimated */
} sched_load;

double sched_kv_bytes(const sched_shape *shape); /* a token, all layers, 2 bytes a value */
/* Seconds; attention is of one layer. */
double sched_attention_s(const sched_device *device, const sched_shape *shape, sched_route route,
                         const sched_load *load);
double sched_decode_s(const sched_device *device, const sched_shape *shape, sched_route route,
                      const sched_load *load);
double sched_prefill_s(const sched_device *device, const sched_shape *shape, double cached,
                       double tokens);

#endif
