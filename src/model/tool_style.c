/* SPDX-License-Identifier: Apache-2.0 */
/* How a model writes calls of tools, by what its chat template says of them. */
#include <string.h>

#include "model/model_parts.h"

static bool says(pkv_span source, const char *text) {
  return source.size > 0 && memmem(source.data, source.size, text, strlen(text)) != NULL;
}

pkv_tool_style pkv_model_tool_style(const pkv_model *model) {
  pkv_span source = {NULL, 0};
  if (model == NULL || model->chat == NULL || !pkv_chat_shows_tools(model->chat) ||
      pkv_gguf_get_string(&source, model->gguf, "tokenizer.chat_template", false, NULL) != PKV_OK)
    return PKV_TOOLS_PLAIN;
  if (says(source, "<tool_call>")) return PKV_TOOLS_TAGGED;
  if (says(source, "[TOOL_CALLS]")) return PKV_TOOLS_MISTRAL;
  return says(source, "\"parameters\"") || says(source, "<|python_tag|>") ? PKV_TOOLS_LLAMA
                                                                          : PKV_TOOLS_SHOWN;
}
