/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling: greedy, and temperature with top-k and top-p by a heap that is popped only as far as
 * needed. */
#include "engine/sampling.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "base/status.h"

/*
 * exp(x) = 2^n exp(r) with |r| <= ln(2) / 2: n by adding and taking away 1.5 * 2^52, whose low bits
 * then hold it, and the series of exp(r) up to r^13 (the next term is below 1e-17).
 */
static inline double exp_negative(double x) {
  static const double shift = 0x1.8p52, log2_e = 0x1.71547652b82fep0;
  static const double ln2_high = 0x1.62e42fefa3800p-1, ln2_low = 0x1.ef35793c76730p-45;
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = clamped * log2_e + shift;
  const double n = shifted - shift;
  const double r = (clamped - n * ln2_high) - n * ln2_low;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023u) << 52;
  double scale;
  memcpy(&scale, &bits, sizeof scale);
  return x < -708.0 ? 0.0 : p * scale;
}

double pkv_exp_negative(double x) {
  return exp_negative(x);
}

/* Independent lanes let the compiler use vectors without reordering what NaN means. */
#define LANES 8
/* Exponentials computed before they are added up one by one. */
#define BLOCK 64

bool pkv_logits_max(float *max, const float *logits, int32_t vocab) {
  float best[LANES], bad[LANES];
  const int32_t whole = vocab / LANES * LANES;
  for (int j = 0; j < LANES; j++) {
    best[j] = -INFINITY;
    bad[j] = 0.0f;
  }
  for (int32_t i = 0; i < whole; i += LANES) {
    for (int j = 0; j < LANES; j++) {
      const float x = logits[i + j];
      best[j] = x > best[j] ? x : best[j];
      bad[j] += x - x; /* 0 for finite x, NaN otherwise, and NaN stays */
    }
  }
  for (int32_t i = whole; i < vocab; i++) {
    const float x = logits[i];
    best[0] = x > best[0] ? x : best[0];
    bad[0] += x - x;
  }
  float top = best[0], sum = bad[0];
  for (int j = 1; j < LANES; j++) {
    top = best[j] > top ? best[j] : top;
    sum += bad[j];
  }
  *max = top;
  return sum == 0.0f;
}

static int32_t first_equal(const float *logits, int32_t vocab, float value) {
  for (int32_t i = 0; i < vocab; i++)
    if (logits[i] == value) return i;
  return -1;
}

static bool better(pkv_candidate a, pkv_candidate b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

static void sift_down(pkv_candidate *heap, int32_t count, int32_t at) {
  const pkv_candidate moving = heap[at];
  for (;;) {
    int32_t child = 2 * at + 1;
    if (child >= count) break;
    if (child + 1 < count && better(heap[child + 1], heap[child])) child++;
    if (!better(heap[child], moving)) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = moving;
}

static void heap_build(pkv_candidate *heap, const float *logits, int32_t vocab) {
  for (int32_t i = 0; i < vocab; i++)
    heap[i] = (pkv_candidate){logits[i], i};
  for (int32_t i = vocab / 2; i-- > 0;)
    sift_down(heap, vocab, i);
}

/* Moves the best of heap[count] to its end, heap[count - 1]: popped ones lie there, best last. */
static void heap_pop(pkv_candidate *heap, int32_t count) {
  const pkv_candidate best = heap[0];
  heap[0] = heap[count - 1];
  sift_down(heap, count - 1, 0);
  heap[count - 1] = best;
}

static double weight(float logit, float max, double temperature) {
  return exp_negative(((double)logit - (double)max) / temperature);
}

/* The first i with weights[0] + .. + weights[i] > u * total. */
static int32_t draw(const double *weights, int32_t count, double total, double u) {
  const double target = u * total;
  double sum = 0.0;
  int32_t last = 0;
  for (int32_t i = 0; i < count; i++) {
    if (weights[i] > 0.0) last = i;
    sum += weights[i];
    if (sum > target) return i;
  }
  return last; /* rounding: u * total reached the sum */
}

/* weights[i] of all tokens; their sum, in the order of ids. */
static double weigh_all(double *weights, const float *logits, int32_t vocab, float max,
                        double temperature) {
  double total = 0.0;
  for (int32_t i = 0; i < vocab; i++)
    weights[i] = weight(logits[i], max, temperature);
  for (int32_t i = 0; i < vocab; i++)
    total += weights[i];
  return total;
}

static int32_t sample_all(const float *logits, int32_t vocab, float max, const pkv_sampling *s,
                          double u, double *weights) {
  double total = weigh_all(weights, logits, vocab, max, (double)s->temperature);
  if (s->min_p > 0.0f) {
    total = 0.0;
    for (int32_t i = 0; i < vocab; i++) {
      if (weights[i] < (double)s->min_p) weights[i] = 0.0; /* the best one's is 1 */
      total += weights[i];
    }
  }
  return draw(weights, vocab, total, u);
}

/* limit: how many of the best may be chosen (top_k, or vocab). */
static int32_t sample_best(const float *logits, int32_t vocab, float max, int32_t limit,
                           const pkv_sampling *s, double u, const pkv_sampling_scratch *scratch) {
  pkv_candidate *const heap = scratch->candidates;
  double *const weights = scratch->weights;
  const double temperature = (double)s->temperature;
  const bool cut = s->top_p > 0.0f && s->top_p < 1.0f;
  double total = 0.0, kept = 0.0;
  int32_t count = 0;
  heap_build(heap, logits, vocab);
  if (limit == vocab) { /* top_p alone: the total is known without sorting */
    total = weigh_all(weights, logits, vocab, max, temperature);
  } else {
    for (int32_t i = 0; i < limit; i++)
      heap_pop(heap, vocab - i);
    for (int32_t i = 0; i < limit; i++)
      total += weight(heap[vocab - 1 - i].logit, max, temperature);
  }
  const double enough = cut ? (double)s->top_p * total : total;
  while (count < limit) {
    if (limit == vocab) heap_pop(heap, vocab - count);
    weights[count] = weight(heap[vocab - 1 - count].logit, max, temperature);
    if (weights[count] < (double)s->min_p) break; /* the first one's is 1 */
    kept += weights[count++];
    if (cut && kept >= enough) break;
  }
  return heap[vocab - 1 - draw(weights, count, kept, u)].token;
}

static int32_t choose(const float *logits, int32_t vocab, float max, const pkv_sampling *sampling,
                      int64_t position, const pkv_sampling_scratch *scratch) {
  if (!(sampling->temperature > 0.0f)) return first_equal(logits, vocab, max);
  const double u = pkv_hash_uniform(sampling->seed, sampling->stream, (uint64_t)position);
  const bool all_k = sampling->top_k <= 0 || sampling->top_k >= vocab;
  const bool all_p = sampling->top_p <= 0.0f || sampling->top_p >= 1.0f;
  if (all_k && all_p) return sample_all(logits, vocab, max, sampling, u, scratch->weights);
  return sample_best(logits, vocab, max, all_k ? vocab : sampling->top_k, sampling, u, scratch);
}

int32_t pkv_sample(const float *logits, int32_t vocab, const pkv_sampling *sampling,
                   int64_t position, const pkv_sampling_scratch *scratch) {
  float max = 0.0f;
  if (!pkv_logits_max(&max, logits, vocab)) return -1;
  return choose(logits, vocab, max, sampling, position, scratch);
}

int32_t pkv_sample_edited(const float *logits, int32_t vocab, const pkv_sampling *sampling,
                          int64_t position, const pkv_sampling_scratch *scratch) {
  float max = -INFINITY;
  for (int32_t i = 0; i < vocab; i++)
    if (logits[i] > max) max = logits[i];
  if (!isfinite(max)) return -1;
  return choose(logits, vocab, max, sampling, position, scratch);
}

double pkv_logits_log_sum(const float *logits, int32_t vocab) {
  double block[BLOCK];
  float max = 0.0f;
  double sum = 0.0;
  (void)pkv_logits_max(&max, logits, vocab);
  for (int32_t first = 0; first < vocab; first += BLOCK) {
    const int32_t count = vocab - first < BLOCK ? vocab - first : BLOCK;
    for (int32_t i = 0; i < count; i++)
      block[i] = exp_negative((double)logits[first + i] - (double)max);
    for (int32_t i = 0; i < count; i++)
      sum += block[i];
  }
  return (double)max + log(sum);
}

int32_t pkv_logits_top(pkv_logprob *top, int32_t count, const float *logits, int32_t vocab,
                       double log_sum) {
  pkv_candidate best[PKV_MAX_TOP_LOGPROBS];
  int32_t held = 0;
  if (count > PKV_MAX_TOP_LOGPROBS) count = PKV_MAX_TOP_LOGPROBS;
  for (int32_t i = 0; i < vocab && count > 0; i++) {
    const pkv_candidate c = {logits[i], i};
    if (held == count && !better(c, best[held - 1])) continue;
    int32_t at = held < count ? held++ : held - 1;
    while (at > 0 && better(c, best[at - 1])) {
      best[at] = best[at - 1];
      at--;
    }
    best[at] = c;
  }
  for (int32_t i = 0; i < held; i++)
    top[i] = (pkv_logprob){best[i].token, (float)((double)best[i].logit - log_sum)};
  return held;
}
