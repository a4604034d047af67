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

/* h200: route balanced on one, fitted to 71 steps (mean error 4.1 %, 62 within 10 %, largest
   15.0 %); GEMM and products as measured on one, a step's base of another engine. h200-fa3: another
   engine's attention; step and L2 rate are read off two of its steps, not fitted. rtx6000-ada: its
   data sheet, with the same step. */
static const sched_device devices[] = {
    {"h200", 4.34, 4.65, 34, 9.71, 1600, 770, 600, 110, 0.085, 132},
    {"h200-fa3", 4.63, 5.2, 60, 6.2, 1600, 770, 600, 110, 0, 0},
    {"rtx6000-ada", 0.96, 5.2, 96, 3.0, 1600, 182, 140, 28, 0, 0},
};

const char *sched_route_name(int32_t route) {
  return route == SCHED_ORDINARY ? "ordinary" : "shared";
}

static const struct field {
  const char *name;
  size_t offset;
  bool optional;
} fields[] = {
    {"read_tb_s", offsetof(sched_device, read_tb_s), false},
    {"read_us", offsetof(sched_device, read_us), false},
    {"l2_mb", offsetof(sched_device, l2_mb), false},
    {"l2_tb_s", offsetof(sched_device, l2_tb_s), false},
    {"step_us", offsetof(sched_device, step_us), false},
    {"gemm_tflops", offsetof(sched_device, gemm_tflops), false},
    {"attention_tflops", offsetof(sched_device, attention_tflops), false},
    {"cache_gb", offsetof(sched_device, cache_gb), false},
    {"row_us", offsetof(sched_device, row_us), true},
    {"side_by_side", offsetof(sched_device, side_by_side), true},
};
#define FIELDS (sizeof fields / sizeof *fields)

static pkv_status from_json(sched_device *out, const json_t *root, const char *path,
                            pkv_error *err) {
  for (size_t i = 0; i < FIELDS; i++) {
    const json_t *const value = json_object_get(root, fields[i].name);
    const bool left_out = fields[i].optional && value == NULL;
    const double number = json_is_number(value) ? json_number_value(value) : left_out ? 0 : -1.0;
    PKV_CHECK(err, (number > 0 || (number >= 0 && fields[i].optional)) && number < 1e9,
              PKV_E_FORMAT, "%s: %s must be a number above 0 and below 1e9", path, fields[i].name);
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

double sched_decode_s(const sched_device *d, const sched_shape *s, sched_route route,
                      const sched_load *load) {
  const double bandwidth = d->read_tb_s * 1e12;
  const double token = sched_kv_bytes(s), layer = token / s->layers;
  const double gemm =
      fmax(2 * s->parameters / bandwidth, 2 * s->parameters * load->rows / (d->gemm_tflops * 1e12));
  const double products =
      4.0 * s->layers * s->query_heads * s->head_dim * load->total / (d->attention_tflops * 1e12);
  const double again = fmax(0, load->total - load->unique) * token;
  const double window = load->shared * layer;
  const double chance = window > 0 ? fmin(1, d->l2_mb * 1e6 / window) : 0;
  const double copies = window > 0 ? again / token / load->shared + 1 : 1;
  const bool near =
      load->rows <= d->side_by_side || (d->side_by_side > 0 && load->rows / copies < 1.5);
  const double hit = near ? again : again * (d->side_by_side > 0 ? sqrt(chance) : chance);
  const double unique = load->unique * token / bandwidth;
  const double read = unique + (again - hit) / bandwidth + hit / (d->l2_tb_s * 1e12);
  return d->step_us / 1e6 + gemm + s->layers * (d->read_us + d->row_us * load->rows) / 1e6 +
         (route == SCHED_SHARED ? products + unique : fmax(products, read));
}

double sched_prefill_s(const sched_device *d, const sched_shape *s, double cached, double tokens) {
  const double seen = tokens * (cached + tokens / 2);
  return 2 * s->parameters * tokens / (d->gemm_tflops * 1e12) +
         4.0 * s->layers * s->query_heads * s->head_dim * seen / (d->attention_tflops * 1e12);
}
