/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walks a model file's table of contents for pkv_model_inspect. Whether the file is usable is asked
 * of pkv_model_open itself, so that the two never disagree.
 */
#include "model/model.h"

#include "base/status.h"
#include "model/folder.h"
#include "model/model_parts.h"

/* The file as pkv_model_open sees it. */
typedef struct verdict {
  pkv_status status;
  pkv_error err;
  pkv_model_info info;
} verdict;

/* path or bytes, as pkv_model_open and pkv_model_open_memory take them. */
static void judge(verdict *v, const char *path, const void *bytes, size_t size,
                  const pkv_allocator *allocator) {
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.allocator = allocator;
  v->err = (pkv_error){PKV_OK, NULL, {0}};
  v->info = (pkv_model_info)PKV_MODEL_INFO_INIT;
  v->status = path != NULL ? pkv_model_open(&model, path, &options, &v->err)
                           : pkv_model_open_memory(&model, bytes, size, &options, &v->err);
  if (v->status != PKV_OK) return;
  pkv_model_get_info(&v->info, model);
  pkv_model_close(model);
}

static bool visit_file(const pkv_inspector *visitor, const pkv_gguf *g, const verdict *v) {
  pkv_inspect_file file = {.format = pkv_gguf_is_folder(g) ? "safetensors" : "GGUF",
                           .version = pkv_gguf_version(g),
                           .alignment = pkv_gguf_alignment(g),
                           .file_bytes = (int64_t)pkv_gguf_file_bytes(g),
                           .data_offset = (int64_t)pkv_gguf_data_offset(g),
                           .keys = (int64_t)pkv_gguf_value_count(g),
                           .tensors = (int64_t)pkv_gguf_tensor_count(g),
                           .usable = v->status,
                           .problem = v->err.text,
                           .model = v->status == PKV_OK ? &v->info : NULL};
  for (size_t i = 0; i < pkv_gguf_tensor_count(g); i++)
    file.tensor_bytes += (int64_t)pkv_gguf_tensor_at(g, i)->bytes;
  return visitor->file == NULL || visitor->file(visitor->user, &file) == 0;
}

/* Element i; strings come in turn, from *cursor. */
static pkv_inspect_element element_of(const pkv_gguf_value *v, uint64_t i,
                                      const unsigned char **cursor) {
  pkv_inspect_element e = {PKV_INSPECT_INT, 0, 0, 0.0, NULL, 0};
  if (v->element_type == PKV_GGUF_STRING) {
    const pkv_span text = pkv_gguf_next_string(cursor);
    e.kind = PKV_INSPECT_TEXT;
    e.text = text.data;
    e.text_bytes = text.size;
  } else if (v->element_type == PKV_GGUF_F32 || v->element_type == PKV_GGUF_F64) {
    e.kind = PKV_INSPECT_FLOAT;
    e.as_float = pkv_gguf_element_float(v, i);
  } else {
    e.as_int = pkv_gguf_element_int(v, i);
    e.as_uint = (uint64_t)e.as_int;
    if (v->element_type == PKV_GGUF_U64) e.kind = PKV_INSPECT_UINT;
    if (v->element_type == PKV_GGUF_BOOL) e.kind = PKV_INSPECT_BOOL;
  }
  return e;
}

static bool visit_key(const pkv_inspector *visitor, const pkv_gguf_value *v, size_t index) {
  const pkv_inspect_key key = {.index = (int64_t)index,
                               .name = v->key.data,
                               .name_bytes = v->key.size,
                               .type = pkv_gguf_type_name(v->type),
                               .element_type = pkv_gguf_type_name(v->element_type),
                               .count = (int64_t)v->count};
  if (visitor->key != NULL && visitor->key(visitor->user, &key) != 0) return false;
  if (visitor->element == NULL) return true;
  const int64_t most = visitor->max_elements;
  const unsigned char *cursor = v->data;
  for (int64_t i = 0; i < key.count && (most == 0 || i < most); i++) {
    const pkv_inspect_element element = element_of(v, (uint64_t)i, &cursor);
    if (visitor->element(visitor->user, &key, i, &element) != 0) return false;
  }
  return true;
}

static bool visit_tensor(const pkv_inspector *visitor, const pkv_gguf_tensor *t, size_t index) {
  pkv_inspect_tensor tensor = {.index = (int64_t)index,
                               .name = t->name.data,
                               .name_bytes = t->name.size,
                               .dims = t->dims,
                               .elements = 1,
                               .bytes = (int64_t)t->bytes,
                               .offset = (int64_t)t->offset,
                               .supported = pkv_weights_computable(t->type)};
  (void)pkv_gguf_type_info(t->type, &tensor.type, NULL, NULL);
  for (int d = 0; d < 4; d++) {
    tensor.extent[d] = t->extent[d];
    tensor.elements *= t->extent[d];
  }
  return visitor->tensor == NULL || visitor->tensor(visitor->user, &tensor) == 0;
}

static void visit(const pkv_inspector *visitor, const pkv_gguf *g, const verdict *v) {
  if (!visit_file(visitor, g, v)) return;
  for (size_t i = 0; i < pkv_gguf_value_count(g); i++)
    if (!visit_key(visitor, pkv_gguf_value_at(g, i), i)) return;
  for (size_t i = 0; i < pkv_gguf_tensor_count(g); i++)
    if (!visit_tensor(visitor, pkv_gguf_tensor_at(g, i), i)) return;
}

static pkv_status inspect(const char *path, const void *bytes, size_t size,
                          const pkv_inspector *visitor, const pkv_allocator *allocator,
                          pkv_error *err) {
  pkv_gguf *g = NULL;
  verdict v;
  PKV_CHECK_STRUCT(err, visitor, pkv_inspector);
  PKV_CHECK(err, visitor->max_elements >= 0, PKV_E_INVALID,
            "visitor->max_elements is %lld, must not be negative",
            (long long)visitor->max_elements);
  if (path == NULL)
    PKV_TRY(pkv_gguf_open_memory(&g, bytes, size, allocator, err));
  else if (pkv_is_folder(path))
    PKV_TRY(pkv_folder_open(&g, path, false, allocator, err));
  else
    PKV_TRY(pkv_gguf_open(&g, path, allocator, err));
  judge(&v, path, bytes, size, allocator);
  visit(visitor, g, &v);
  pkv_gguf_close(g);
  return PKV_OK;
}

pkv_status pkv_model_inspect(const char *path, const pkv_inspector *visitor,
                             const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, path != NULL, PKV_E_INVALID, "path is NULL");
  return inspect(path, NULL, 0, visitor, allocator, err);
}

pkv_status pkv_model_inspect_memory(const void *bytes, size_t size, const pkv_inspector *visitor,
                                    const pkv_allocator *allocator, pkv_error *err) {
  return inspect(NULL, bytes, size, visitor, allocator, err);
}
