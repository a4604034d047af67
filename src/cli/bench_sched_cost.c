/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_cost.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <jansson.h>

/* Parameters without the input embedding, where the output has its own. */
const sched_shape sched_shapes[SCHED_SHAPES] = {
    {"llama-3-8b", 32, 32, 8, 128, 7.50e9},     {"qwen-0.5b", 24, 14, 2, 64, 0.494e9},
    {"qwen-1.5b", 28, 12, 2, 128, 1.54e9},      {"qwen-8b", 36, 32, 8, 128, 7.57e9},
    {"longchat-13b", 40, 40, 40, 128, 12.85e9},
};

/* h200: route balanced on one, fitted to 71 steps (bench/fit_l2.py: mean error 2.2 %, 70 within
   10 %; 124 steps of later runs: 5.0 %, 114); GEMM and products as measured on one, a step's base
   of another engine. h200-fa3: another engine's attention; step and L2 rate are read off two of its
   steps, not fitted. rtx6000-ada: its data sheet, with the same step. */
static const sched_device devices[] = {
    {"h200", 4.244, 6.14, 18, 9.45, 1600, 770, 600, 110, 0.0852, 1.9, 264, 0.03},
    {"h200-fa3", 4.63, 5.2, 60, 6.2, 1600, 770, 600, 110, 0, 1, 0, 0},
    {"rtx6000-ada", 0.96, 5.2, 96, 3.0, 1600, 182, 140, 28, 0, 1, 0, 0},
};

const char *sched_route_name(int32_t route) {
  return route == SCHED_ORDINARY ? "ordinary" : "shared";
}

static const struct field {
  const char *name;
  size_t offset;
  double left_out; /* what it is then; below 0 = it must be there */
} fields[] = {
    {"read_tb_s", offsetof(sched_device, read_tb_s), -1},
    {"read_us", offsetof(sched_device, read_us), -1},
    {"l2_mb", offsetof(sched_device, l2_mb), -1},
    {"l2_tb_s", offsetof(sched_device, l2_tb_s), -1},
    {"step_us", offsetof(sched_device, step_us), -1},
    {"gemm_tflops", offsetof(sched_device, gemm_tflops), -1},
    {"attention_tflops", offsetof(sched_device, attention_tflops), -1},
    {"cache_gb", offsetof(sched_device, cache_gb), -1},
    {"row_us", offsetof(sched_device, row_us), 0},
    {"overlap", offsetof(sched_device, overlap), 1},
    {"parts", offsetof(sched_device, parts), 0},
    {"spread", offsetof(sched_device, spread), 0},
};
#define FIELDS (sizeof fields / sizeof *fields)

static pkv_status from_json(sched_device *out, const json_t *root, const char *path,
                            pkv_error *err) {
  for (size_t i = 0; i < FIELDS; i++) {
    const json_t *const value = json_object_get(root, fields[i].name);
    const double least = fields[i].left_out;
    const double number = json_is_number(value) ? json_number_value(value)
                          : value == NULL       ? least
                                                : -1;
    PKV_CHECK(err, (number > 0 || (number >= 0 && least == 0)) && number < 1e9, PKV_E_FORMAT,
              "%s: %s must be a number above 0 and below 1e9", path, fields[i].name);
    memcpy((char *)out + fields[i].offset, &number, sizeof number);
  }
  const char *const name = json_string_value(json_object_get(root, "name"));
  PKV_CHECK(err, name && strlen(name) < sizeof out->name && !strpbrk(name, ",\"\n"), PKV_E_FORMAT,
            "%s: name must be a text of less than %zu bytes without commas", path,
            sizeof out->name);
  memcpy(out->name, name, strlen(name) + 1);
  return PKV_OK;
}

pkv_status sched_device_load(sched_device *out, const char *name, pkv_error *err) {
  json_error_t fault;
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
    if (strcmp(devices[i].name, name) == 0) {
      *out = devices[i];
      return PKV_OK;
    }
  memset(out, 0, sizeof *out);
  json_t *const root = json_load_file(name, JSON_REJECT_DUPLICATES, &fault);
  PKV_CHECK(err, root, PKV_E_FORMAT, "profile %s, line %d: %s", name, fault.line, fault.text);
  const pkv_status status = from_json(out, root, name, err);
  json_decref(root);
  return status;
}

double sched_kv_bytes(const sched_shape *shape) {
  return 4.0 * shape->layers * shape->kv_heads * shape->head_dim;
}

/* The share of what is read again that comes from L2. */
static double held(const sched_device *d, const sched_shape *s, const sched_load *load) {
  const double shared = load->shared * sched_kv_bytes(s) / s->layers;
  if (load->held >= 0) return load->held;
  if (shared <= d->l2_mb * 1e6) return 1;
  const double c = d->l2_mb * 1e6 / shared;
  if (!(d->parts >= 1)) return c;
  return load->rows * s->kv_heads <= d->parts ? 1 : c * (1 - log(c));
}

double sched_attention_s(const sched_device *d, const sched_shape *s, sched_route route,
                         const sched_load *load) {
  const double layer = sched_kv_bytes(s) / s->layers;
  const double memory = d->read_tb_s * 1e12, l2 = d->l2_tb_s * 1e12, p = d->overlap;
  const double products =
      4.0 * s->query_heads * s->head_dim * load->total / (d->attention_tflops * 1e12);
  const double wait = (d->read_us + d->row_us * load->rows) / 1e6;
  if (route == SCHED_SHARED) return wait + products + load->unique * layer / memory;
  const double again = fmax(0, load->total - load->unique) * layer;
  const double missed = load->unique * layer + again * (1 - held(d, s, load));
  const double slower = fmax(0, pow(memory, -p) - pow(l2, -p)); /* the rate of memory, to -p */
  const double read = pow(pow(load->total * layer / l2, p) + pow(missed, p) * slower, 1 / p);
  return wait + fmax(products, read);
}

double sched_decode_s(const sched_device *d, const sched_shape *s, sched_route route,
                      const sched_load *load) {
  const double weights = 2 * s->parameters / (d->read_tb_s * 1e12);
  const double gemm = 2 * s->parameters * load->rows / (d->gemm_tflops * 1e12);
  return d->step_us / 1e6 + fmax(weights, gemm) + s->layers * sched_attention_s(d, s, route, load);
}

double sched_prefill_s(const sched_device *d, const sched_shape *s, double cached, double tokens) {
  const double seen = tokens * (cached + tokens / 2);
  return 2 * s->parameters * tokens / (d->gemm_tflops * 1e12) +
         4.0 * s->layers * s->query_heads * s->head_dim * seen / (d->attention_tflops * 1e12);
}
