/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_llama_tables.h"

#include <math.h>
#include <string.h>

static double mean_of(const bench_figure *figure) {
  double sum = 0.0;
  for (int32_t i = 0; i < figure->count; i++)
    sum += figure->sample[i];
  return figure->count > 0 ? sum / figure->count : 0.0;
}

/* Of a sample: 0 where there is one value only. */
static double deviation_of(const bench_figure *figure) {
  const double mean = mean_of(figure);
  double sum = 0.0;
  for (int32_t i = 0; i < figure->count; i++)
    sum += (figure->sample[i] - mean) * (figure->sample[i] - mean);
  return figure->count > 1 ? sqrt(sum / (figure->count - 1)) : 0.0;
}

void bench_llama_head(void) {
  (void)printf("| model | size | params | backend | threads | test | t/s |\n"
               "| --- | ---: | ---: | --- | ---: | ---: | ---: |\n");
}

void bench_llama_row(const bench_model_run *run, const char *backend, const pkv_model_info *info,
                     const bench_figure *figure) {
  /* "tg64@d2048" is "tg64 @ d2048" there. */
  const char *const at = strchr(figure->cell, '@');
  const int before = at != NULL ? (int)(at - figure->cell) : (int)strlen(figure->cell);
  (void)printf("| %s | %.2f MiB | %.2f M | %s | %d | %.*s%s%s | %.2f ± %.2f |\n", run->model,
               (double)info->weight_bytes / (1 << 20), (double)info->parameters * 1e-6, backend,
               (int)run->threads, before, figure->cell, at != NULL ? " @ " : "",
               at != NULL ? at + 1 : "", mean_of(figure), deviation_of(figure));
  (void)fflush(stdout);
}

void bench_llama_batched_head(void) {
  (void)printf("\n|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |"
               "      T s |    S t/s |\n"
               "|-------|--------|------|--------|----------|----------|----------|----------|"
               "----------|----------|\n");
}

void bench_llama_batched_row(const bench_crowd *crowd, const bench_figure figures[2]) {
  const bool grouped = crowd->groups > 0 && crowd->groups < crowd->sequences;
  const int64_t prompts = grouped ? crowd->groups : crowd->sequences;
  const int64_t prompt_tokens = prompts * crowd->prompt + (int64_t)crowd->sequences * crowd->suffix;
  const int64_t answers = (int64_t)crowd->sequences * crowd->tokens;
  const double prompt_speed = mean_of(&figures[0]), speed = mean_of(&figures[1]);
  const double prompt_s = (double)prompt_tokens / prompt_speed, s = (double)answers / speed;
  (void)printf("| %5d | %6d | %4d | %6lld | %8.3f | %8.2f | %8.3f | %8.2f | %8.3f | %8.2f |\n",
               (int)(crowd->prompt + crowd->suffix), (int)crowd->tokens, (int)crowd->sequences,
               (long long)(prompt_tokens + answers), prompt_s, prompt_speed, s, speed, prompt_s + s,
               (double)(prompt_tokens + answers) / (prompt_s + s));
  (void)fflush(stdout);
}
