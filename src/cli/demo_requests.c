/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/demo_requests.h"

#include <stdio.h>
#include <string.h>

/* Part of the package base-files, which no Debian system is without. */
#define FOLDER "/usr/share/common-licenses"

static const char *const documents[] = {"GPL-3",    "Apache-2.0", "MPL-2.0", "GFDL-1.3", "LGPL-2.1",
                                        "Artistic", "GPL-2",      "MPL-1.1", "GFDL-1.2", "LGPL-2"};
#define DOCUMENTS ((int)(sizeof documents / sizeof *documents))

static const char *const questions[] = {
    "What is the name of this document, and which version is it?",
    "Summarize the document in one sentence.",
    "What does the document say about warranty?",
    "Who may copy and distribute the work?",
    "What must people do who change the work?",
    "Which terms does the document define? Name three.",
    "What does the document say about patents?",
    "Explain the purpose of the document to a child.",
};
#define QUESTIONS ((int)(sizeof questions / sizeof *questions))

/* From the second round over the questions on they differ by how to answer. */
static const char *const manners[] = {"", " Answer briefly.", " Answer with a list.",
                                      " Quote the document.", " Give an example."};
#define MANNERS ((int)(sizeof manners / sizeof *manners))

/* The text of the first `limit` tokens, cut back to a whole line. */
static pkv_status cut_text(pkv_buffer *out, const pkv_model *model, const pkv_buffer *text,
                           int limit, pkv_error *err) {
  pkv_tokens tokens = {NULL, 0};
  pkv_status status = pkv_tokens_from_text(&tokens, model, text->data, text->size, 0, err);
  for (size_t i = 0; status == PKV_OK && i < tokens.count && i < (size_t)limit; i++) {
    const char *piece = NULL;
    size_t bytes = 0;
    status = pkv_token_text(&piece, &bytes, model, tokens.ids[i], 0, err);
    if (status == PKV_OK) status = pkv_buffer_append(out, piece, bytes, err);
  }
  pkv_tokens_free(&tokens);
  while (status == PKV_OK && out->size > 0 && out->data[out->size - 1] != '\n')
    out->data[--out->size] = '\0';
  return status;
}

/* Finds the next document that is there, from *next on. */
static pkv_status read_document(pkv_buffer *out, const char **name, int *next,
                                const pkv_model *model, int prefix, pkv_error *err) {
  while (*next < DOCUMENTS) {
    char path[96];
    pkv_buffer text;
    pkv_buffer_init(&text, (size_t)1 << 20, NULL);
    *name = documents[(*next)++];
    (void)snprintf(path, sizeof path, FOLDER "/%s", *name);
    pkv_status status = pkv_buffer_read_file(&text, path, NULL);
    const bool here = status == PKV_OK && text.size > 0;
    if (here) status = cut_text(out, model, &text, prefix, err);
    pkv_buffer_deinit(&text);
    if (here) return status;
  }
  return PKV_FAIL(err, PKV_E_IO,
                  "not enough documents in " FOLDER
                  " (package base-files): ask for fewer --groups");
}

static pkv_status make_prompt(pkv_demo_request *r, const pkv_model *model, const char *document,
                              pkv_error *err) {
  pkv_buffer user;
  pkv_buffer_init(&user, (size_t)4 << 20, NULL);
  pkv_status status =
      pkv_buffer_printf(&user, err, "Here is the beginning of a document.\n\n%s\nQuestion: %s",
                        document, r->question);
  if (status == PKV_OK) {
    const pkv_message messages[] = {
        {"system", "You answer questions about a document in one or two sentences."},
        {"user", user.data}};
    status = pkv_tokens_from_chat(&r->prompt, model, messages, 2, err);
  }
  pkv_buffer_deinit(&user);
  return status;
}

static pkv_status make_group(pkv_demo_request *requests, int count, int groups, int group,
                             const char *name, const pkv_buffer *document, const pkv_model *model,
                             pkv_error *err) {
  for (int i = group, n = 0; i < count; i += groups, n++) {
    pkv_demo_request *const r = &requests[i];
    r->group = group;
    r->document = name;
    (void)snprintf(r->question, sizeof r->question, "%s%s", questions[n % QUESTIONS],
                   manners[n / QUESTIONS % MANNERS]);
    PKV_TRY(make_prompt(r, model, document->data, err));
  }
  return PKV_OK;
}

pkv_status pkv_demo_requests(pkv_demo_request *requests, int count, int groups, int prefix,
                             const pkv_model *model, pkv_error *err) {
  int next = 0;
  memset(requests, 0, (size_t)count * sizeof *requests);
  for (int group = 0; group < groups && group < count; group++) {
    const char *name = NULL;
    pkv_buffer document;
    pkv_buffer_init(&document, (size_t)1 << 20, NULL);
    pkv_status status = read_document(&document, &name, &next, model, prefix, err);
    if (status == PKV_OK)
      status = make_group(requests, count, groups, group, name, &document, model, err);
    pkv_buffer_deinit(&document);
    PKV_TRY(status);
  }
  return PKV_OK;
}

void pkv_demo_requests_free(pkv_demo_request *requests, int count) {
  for (int i = 0; i < count; i++)
    pkv_tokens_free(&requests[i].prompt);
}
