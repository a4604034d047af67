/* SPDX-License-Identifier: Apache-2.0 */
#include "server/token_list.h"

#include "base/alloc.h"
#include "base/status.h"

static pkv_status allocate(pkv_tokens *out, size_t count, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  out->ids = pkv_alloc_zeroed(&a, count + 1, sizeof *out->ids);
  PKV_CHECK(err, out->ids != NULL, PKV_E_NOMEM, "no memory for %zu tokens", count);
  out->count = count;
  return PKV_OK;
}

/* What failed holds nothing. */
static pkv_status checked(pkv_tokens *out, pkv_status status) {
  if (status != PKV_OK) pkv_tokens_free(out);
  return status;
}

pkv_status pkv_tokens_from_text(pkv_tokens *out, const pkv_model *model, const char *text,
                                size_t bytes, uint32_t flags, pkv_error *err) {
  size_t count = 0;
  *out = (pkv_tokens){NULL, 0};
  const pkv_status status = pkv_tokenize(NULL, 0, &count, model, text, bytes, flags, err);
  if (status != PKV_OK && status != PKV_E_TOO_SMALL) return status;
  PKV_TRY(allocate(out, count, err));
  if (count == 0) return PKV_OK;
  return checked(out, pkv_tokenize(out->ids, count, &count, model, text, bytes, flags, err));
}

pkv_status pkv_tokens_from_chat(pkv_tokens *out, const pkv_model *model,
                                const pkv_message *messages, size_t message_count, pkv_error *err) {
  size_t count = 0;
  *out = (pkv_tokens){NULL, 0};
  const pkv_status status =
      pkv_chat_tokenize(NULL, 0, &count, model, messages, message_count, 1, err);
  if (status != PKV_OK && status != PKV_E_TOO_SMALL) return status;
  PKV_TRY(allocate(out, count, err));
  if (count == 0) return PKV_OK;
  return checked(
      out, pkv_chat_tokenize(out->ids, count, &count, model, messages, message_count, 1, err));
}

pkv_status pkv_tokens_from_chat_json(pkv_tokens *out, const pkv_model *model, const char *json,
                                     size_t bytes, pkv_error *err) {
  size_t count = 0;
  *out = (pkv_tokens){NULL, 0};
  const pkv_status status = pkv_chat_tokenize_json(NULL, 0, &count, model, json, bytes, 1, err);
  if (status != PKV_OK && status != PKV_E_TOO_SMALL) return status;
  PKV_TRY(allocate(out, count, err));
  if (count == 0) return PKV_OK;
  return checked(out, pkv_chat_tokenize_json(out->ids, count, &count, model, json, bytes, 1, err));
}

void pkv_tokens_free(pkv_tokens *tokens) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_free(&a, tokens->ids, (tokens->count + 1) * sizeof(int32_t));
  *tokens = (pkv_tokens){NULL, 0};
}
