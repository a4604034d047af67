/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv bench layer`: attention and MLP of one layer on a GPU, and attention's share. */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "measure/layer_bench.h"

#define MAX_LIST 16
#define BYTES_US 4.63e6 /* a cold read's rate on an H200 */

typedef struct bench_layer_options {
  const char *shape, *rows, *lengths, *csv, *commit;
} bench_layer_options;

static const pkv_layer_shape shapes[] = {{"llama-3-8b", 4096, 14336, 32, 8, 128, 0},
                                         {"llama-3-70b", 8192, 28672, 64, 8, 128, 0},
                                         {"qwen3-8b", 4096, 12288, 32, 8, 128, 1},
                                         {"qwen3-32b", 5120, 25600, 64, 8, 128, 1}};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

#define O bench_layer_options
static const pkv_option options_table[] = {
    PKV_TEXT(O, shape, 0, "shape", "NAME", NULL,
             "llama-3-8b, llama-3-70b, qwen3-8b or qwen3-32b; by default all"),
    PKV_TEXT(O, rows, 0, "rows", "LIST", "1,8,32,64", "rows of the batch, separated by commas"),
    PKV_TEXT(O, lengths, 0, "length", "LIST", "1024,8192", "tokens of each row"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "append result rows"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
};
#undef O

typedef struct int_list {
  int32_t count, value[MAX_LIST];
} int_list;

static bool parse_list(int_list *out, const char *text, int32_t highest) {
  const char *at = text;
  out->count = 0;
  do {
    char word[16];
    int64_t value;
    const size_t size = strcspn(at, ",");
    if (size == 0 || size >= sizeof word || out->count == MAX_LIST) return false;
    memcpy(word, at, size);
    word[size] = '\0';
    if (!pkv_parse_i64(&value, word, 1, highest)) return false;
    out->value[out->count++] = (int32_t)value;
    at += size;
    if (*at == ',' && *++at == '\0') return false;
  } while (*at != '\0');
  return true;
}

typedef struct bench_layer {
  const bench_layer_options *o;
  int_list rows, lengths;
  pkv_meter *meter;
  FILE *csv;
} bench_layer;

static pkv_status run_cell(bench_layer *b, const pkv_layer_shape *shape, int32_t rows,
                           int32_t length, pkv_error *err) {
  pkv_layer_times t;
  PKV_CHECK(err, !pkv_cli_interrupted(), PKV_E_STATE, "interrupted");
  PKV_TRY(pkv_layer_bench(&t, b->meter, shape, rows, length, err));
  const double floor = (t.weight_bytes + t.kv_bytes) / BYTES_US;
  const double share = t.attention_us / t.layer_us;
  (void)printf("%-12s %5d %7d %10.1f %10.1f %6.0f%% %9.1f %6.2f\n", shape->name, (int)rows,
               (int)length, t.layer_us, t.attention_us, 100.0 * share, floor, t.layer_us / floor);
  (void)fflush(stdout);
  if (b->csv == NULL) return PKV_OK;
  const int wrote =
      fprintf(b->csv, "%s,%s,%s,%s,%d,%d,%d,%.2f,%.2f,%.4f,%.2f,%.3f\n", b->o->commit,
              b->meter->info.device, b->meter->info.driver, shape->name, (int)rows, (int)length,
              (int)t.layers, t.layer_us, t.attention_us, share, floor, t.layer_us / floor);
  PKV_CHECK(err, wrote > 0, PKV_E_IO, "cannot write %s", b->o->csv);
  return PKV_OK;
}

static pkv_status work(bench_layer *b, pkv_error *err) {
  PKV_TRY(pkv_meter_create(&b->meter, err));
  (void)printf("%s, %s\n\n%-12s %5s %7s %10s %10s %7s %9s %6s\n", b->meter->info.device,
               b->meter->info.driver, "shape", "rows", "length", "layer us", "attn us", "share",
               "floor us", "ratio");
  if (b->csv != NULL && ftell(b->csv) == 0)
    (void)fprintf(b->csv, "commit,device,driver,shape,rows,length,layers,layer_us,attention_us,"
                          "attention_share,floor_us,ratio\n");
  for (int s = 0; s < SHAPES; s++) {
    if (b->o->shape != NULL && strcmp(b->o->shape, shapes[s].name) != 0) continue;
    for (int32_t i = 0; i < b->rows.count; i++)
      for (int32_t k = 0; k < b->lengths.count; k++)
        PKV_TRY(run_cell(b, &shapes[s], b->rows.value[i], b->lengths.value[k], err));
  }
  return PKV_OK;
}

static bool is_shape(const char *name) {
  for (int s = 0; s < SHAPES; s++)
    if (strcmp(name, shapes[s].name) == 0) return true;
  return false;
}

static int run(const pkv_cli *cli, const void *options) {
  bench_layer b = {.o = options};
  pkv_error err = {PKV_OK, "", ""};
  if (b.o->shape != NULL && !is_shape(b.o->shape))
    return pkv_cli_usage(cli, "--shape '%s' is none of the known ones", b.o->shape);
  if (!parse_list(&b.rows, b.o->rows, 1024))
    return pkv_cli_usage(cli, "--rows is '%s'; it takes counts up to 1024 like 1,8", b.o->rows);
  if (!parse_list(&b.lengths, b.o->lengths, 1 << 20))
    return pkv_cli_usage(cli, "--length is '%s'; it takes token counts like 1024,8192",
                         b.o->lengths);
  if (b.o->csv != NULL) {
    b.csv = fopen(b.o->csv, "ae");
    if (b.csv == NULL || fseek(b.csv, 0, SEEK_END) != 0) {
      pkv_cli_error(cli, "cannot open %s", b.o->csv);
      return PKV_EXIT_FAILURE;
    }
  }
  const pkv_status status = work(&b, &err);
  pkv_meter_destroy(b.meter);
  if (b.csv != NULL && fclose(b.csv) != 0 && status == PKV_OK) {
    pkv_cli_error(cli, "cannot write %s", b.o->csv);
    return PKV_EXIT_FAILURE;
  }
  return status == PKV_OK ? PKV_EXIT_OK : pkv_cli_fail(cli, &err);
}

const pkv_command pkv_command_bench_layer = {
    .name = "bench layer",
    .summary = "measure one layer of a model on a GPU",
    .details = "Decoding rows of one length through norm, q k v, rotation, attention, output "
               "product, norm and gated MLP, with random bf16 weights, in a replayed graph of "
               "several layers that together leave nothing in the last-level cache. The share is "
               "attention's, timed alone in the same graph; floor is what a layer must read at "
               "4.63 TB/s (an H200).",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(bench_layer_options),
    .run = run,
};
