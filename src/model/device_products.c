/* SPDX-License-Identifier: Apache-2.0 */
/* The text is backend/product_choices.h's. Devices of one engine have one file: they are equal, and
   their products differ in shape. */
#include "model/device_products.h"

#include <unistd.h>

#include "backend/device_ops.h"
#include "base/log.h"
#include "base/replace_file.h"
#include "base/status.h"

#define MOST_BYTES ((size_t)1 << 20)

static pkv_status read_file(pkv_product_choice *choices, int32_t *count, pkv_executor *executor,
                            const char *path, const pkv_allocator *a, pkv_error *err) {
  char maker[PKV_PRODUCT_MAKER];
  pkv_buffer text;
  executor->device_ops->products_maker(maker, executor);
  pkv_buffer_init(&text, MOST_BYTES, a);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK)
    status = pkv_product_choices_parse(choices, count, maker, text.data, text.size, err);
  pkv_buffer_deinit(&text);
  return status;
}

void pkv_device_products_load(pkv_executor *const *executors, int32_t count, const char *path,
                              const pkv_allocator *allocator) {
  const size_t bytes = PKV_PRODUCT_CHOICES * sizeof(pkv_product_choice);
  pkv_error err = {PKV_OK, "", ""};
  int32_t known = 0;
  if (!executors[0]->device_ops->products_list || access(path, F_OK) != 0) return;
  pkv_product_choice *const choices = pkv_alloc(allocator, bytes);
  if (!choices) return;
  if (read_file(choices, &known, executors[0], path, allocator, &err) != PKV_OK)
    pkv_log(PKV_LOG_WARN, "model", "%s is not used, products are measured: %s", path, err.text);
  for (int32_t r = 0; r < count; r++)
    executors[r]->device_ops->products_take(executors[r], choices, known);
  pkv_free(allocator, choices, bytes);
}

static bool equal(const pkv_product_choice *a, const pkv_product_choice *b) {
  return a->n == b->n && a->k == b->k && a->x_stride == b->x_stride && a->y_stride == b->y_stride &&
         a->m == b->m && a->act == b->act && a->y_f32 == b->y_f32 && a->accumulate == b->accumulate;
}

/* Those of all devices, each once. */
static int32_t collect(pkv_product_choice *out, pkv_product_choice *scratch, int32_t *timed,
                       pkv_executor *const *executors, int32_t count) {
  int32_t all = 0;
  *timed = 0;
  for (int32_t r = 0; r < count; r++) {
    int32_t more = 0;
    const int32_t here = executors[r]->device_ops->products_list(scratch, &more, executors[r]);
    *timed += more;
    for (int32_t i = 0; i < here && all < PKV_PRODUCT_CHOICES; i++) {
      int32_t at = 0;
      while (at < all && !equal(&out[at], &scratch[i]))
        at++;
      if (at == all) out[all++] = scratch[i];
    }
  }
  return all;
}

static pkv_status write_file(const pkv_product_choice *choices, int32_t count,
                             pkv_executor *executor, const char *path, const pkv_allocator *a,
                             pkv_error *err) {
  char maker[PKV_PRODUCT_MAKER];
  pkv_buffer text;
  executor->device_ops->products_maker(maker, executor);
  pkv_buffer_init(&text, MOST_BYTES, a);
  pkv_status status = pkv_product_choices_print(&text, maker, choices, count, err);
  if (status == PKV_OK) {
    pkv_bytes bytes = {text.data, text.size};
    status = pkv_replace_file(path, pkv_write_bytes, &bytes, err);
  }
  pkv_buffer_deinit(&text);
  return status;
}

int32_t pkv_device_products_save(pkv_executor *const *executors, int32_t count, const char *path,
                                 int32_t saved, const pkv_allocator *allocator) {
  const size_t bytes = 2 * PKV_PRODUCT_CHOICES * sizeof(pkv_product_choice);
  pkv_error err = {PKV_OK, "", ""};
  int32_t timed = 0;
  if (!executors[0]->device_ops->products_list) return saved;
  pkv_product_choice *const choices = pkv_alloc(allocator, bytes);
  if (!choices) return saved;
  const int32_t all = collect(choices, choices + PKV_PRODUCT_CHOICES, &timed, executors, count);
  if (timed > saved && write_file(choices, all, executors[0], path, allocator, &err) != PKV_OK)
    pkv_log(PKV_LOG_WARN, "model", "which products are the fastest was not saved: %s", err.text);
  pkv_free(allocator, choices, bytes);
  return timed;
}
