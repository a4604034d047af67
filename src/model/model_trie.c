/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary as a tree of texts, for constraints: made when it is first asked for, by whichever
   thread. */
#include <pthread.h>

#include "base/status.h"
#include "model/model_parts.h"

struct pkv_lazy_trie {
  pthread_mutex_t lock; /* guards `trie` until it is made */
  pkv_token_trie *trie;
};

pkv_status pkv_lazy_trie_create(pkv_lazy_trie **out, const pkv_allocator *allocator,
                                pkv_error *err) {
  *out = pkv_alloc_zeroed(allocator, 1, sizeof **out);
  PKV_CHECK(err, *out != NULL, PKV_E_NOMEM, "no memory for a model");
  (void)pthread_mutex_init(&(*out)->lock, NULL);
  return PKV_OK;
}

void pkv_lazy_trie_destroy(pkv_lazy_trie *lazy, const pkv_allocator *allocator) {
  if (lazy == NULL) return;
  pkv_token_trie_destroy(lazy->trie);
  (void)pthread_mutex_destroy(&lazy->lock);
  pkv_free(allocator, lazy, sizeof *lazy);
}

static void text_of(const void *user, int32_t token, const char **bytes, size_t *count) {
  *bytes = NULL;
  *count = 0;
  if (pkv_token_text(bytes, count, user, token, 0, NULL) != PKV_OK) *count = 0;
}

pkv_status pkv_model_trie(const pkv_token_trie **out, const pkv_model *model, pkv_error *err) {
  pkv_lazy_trie *const lazy = model->lazy_trie;
  pkv_status status = PKV_OK;
  *out = NULL;
  PKV_CHECK(err, model->tokenizer != NULL, PKV_E_UNSUPPORTED, "the model has no tokenizer");
  (void)pthread_mutex_lock(&lazy->lock);
  if (lazy->trie == NULL)
    status = pkv_token_trie_create(&lazy->trie, pkv_tokenizer_vocab_used(model->tokenizer), text_of,
                                   model, &model->allocator, err);
  *out = lazy->trie;
  (void)pthread_mutex_unlock(&lazy->lock);
  return status;
}
