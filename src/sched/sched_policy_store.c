/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learners' tables in files. Little-endian:
 *
 *   8 bytes  "pkvlearn"
 *   u32      version, policy, states, actions
 *   f64      sum of rewards, number of rewards
 *   f64      visits, value   [states][actions]
 *   u64      XXH3 of all before
 */
#include "sched/sched_parts.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/replace_file.h"
#include "base/text.h"

#define MAGIC   "pkvlearn"
#define VERSION 1u
#define HEAD    (8 + 4 * 4 + 2 * 8)
#define BYTES   ((size_t)HEAD + (size_t)PKV_SCHED_STATES * PKV_SCHED_ACTIONS * 16 + 8)

static unsigned char *put(unsigned char *p, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++)
    *p++ = (unsigned char)(value >> (8 * i));
  return p;
}

static uint64_t get(const unsigned char *p, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; i++)
    value |= (uint64_t)p[i] << (8 * i);
  return value;
}

static unsigned char *put_real(unsigned char *p, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return put(p, bits, 8);
}

static double get_real(const unsigned char *p) {
  const uint64_t bits = get(p, 8);
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void encode(unsigned char *bytes, const pkv_sched *s) {
  const pkv_sched_learner *l = s->learner;
  memcpy(bytes, MAGIC, 8);
  unsigned char *p = put(bytes + 8, VERSION, 4);
  p = put(p, (uint64_t)s->o.policy, 4);
  p = put(p, PKV_SCHED_STATES, 4);
  p = put(p, PKV_SCHED_ACTIONS, 4);
  p = put_real(p, l->reward_sum);
  p = put_real(p, l->rewards);
  for (int i = 0; i < PKV_SCHED_STATES; i++)
    for (int a = 0; a < PKV_SCHED_ACTIONS; a++)
      p = put_real(put_real(p, l->arms[i][a].visits), l->arms[i][a].value);
  (void)put(p, pkv_hash_bytes(bytes, BYTES - 8, 0), 8);
}

static bool is_learner(const pkv_sched *s) {
  return s->learner != NULL;
}

pkv_status pkv_sched_save_learner(const pkv_sched *sched, const char *path, pkv_error *err) {
  PKV_CHECK(err, sched && path, PKV_E_INVALID, "%s is NULL", sched == NULL ? "sched" : "path");
  PKV_CHECK(err, is_learner(sched), PKV_E_UNSUPPORTED, "policy %s does not learn",
            pkv_sched_policy_name(sched->o.policy));
  unsigned char *bytes = pkv_alloc(&sched->allocator, BYTES);
  PKV_CHECK(err, bytes != NULL, PKV_E_NOMEM, "no memory for a table of %zu bytes", BYTES);
  encode(bytes, sched);
  const pkv_status status =
      pkv_replace_file(path, pkv_write_bytes, &(pkv_bytes){bytes, BYTES}, err);
  pkv_free(&sched->allocator, bytes, BYTES);
  return status;
}

static pkv_status check(const pkv_sched *s, const unsigned char *p, size_t bytes, const char *path,
                        pkv_error *err) {
  PKV_CHECK(err, bytes == BYTES && memcmp(p, MAGIC, 8) == 0, PKV_E_FORMAT,
            "%.100s: no learner's table (%zu bytes, a table has %zu)", path, bytes, BYTES);
  PKV_CHECK(err, get(p + 8, 4) == VERSION, PKV_E_FORMAT, "%.100s: version %u, this library has %u",
            path, (unsigned)get(p + 8, 4), VERSION);
  PKV_CHECK(err, get(p + 12, 4) == (uint64_t)s->o.policy, PKV_E_FORMAT,
            "%.100s: of policy %s, not %s", path,
            pkv_sched_policy_name((pkv_sched_policy)(int32_t)(uint32_t)get(p + 12, 4)),
            pkv_sched_policy_name(s->o.policy));
  PKV_CHECK(err, get(p + 16, 4) == PKV_SCHED_STATES && get(p + 20, 4) == PKV_SCHED_ACTIONS,
            PKV_E_FORMAT, "%.100s: %u states with %u actions, this library has %d and %d", path,
            (unsigned)get(p + 16, 4), (unsigned)get(p + 20, 4), PKV_SCHED_STATES,
            PKV_SCHED_ACTIONS);
  PKV_CHECK(err, get(p + BYTES - 8, 8) == pkv_hash_bytes(p, BYTES - 8, 0), PKV_E_FORMAT,
            "%.100s: damaged, its checksum is wrong", path);
  for (size_t at = 24; at < BYTES - 8; at += 8) {
    const double value = get_real(p + at);
    const bool visits = (at - 24) % 16 == (at < HEAD ? 8 : 0);
    PKV_CHECK(err, isfinite(value) && (!visits || value >= 0), PKV_E_FORMAT,
              "%.100s: %g at byte %zu is not possible", path, value, at);
  }
  return PKV_OK;
}

static void decode(pkv_sched_learner *l, const unsigned char *p) {
  memset(l, 0, sizeof *l);
  l->reward_sum = get_real(p + 24);
  l->rewards = get_real(p + 32);
  p += HEAD;
  for (int i = 0; i < PKV_SCHED_STATES; i++)
    for (int a = 0; a < PKV_SCHED_ACTIONS; a++, p += 16)
      l->arms[i][a] = (pkv_sched_arm){get_real(p), get_real(p + 8)};
}

pkv_status pkv_sched_load_learner(pkv_sched *sched, const char *path, pkv_error *err) {
  PKV_CHECK(err, sched && path, PKV_E_INVALID, "%s is NULL", sched == NULL ? "sched" : "path");
  PKV_CHECK(err, is_learner(sched), PKV_E_UNSUPPORTED, "policy %s does not learn",
            pkv_sched_policy_name(sched->o.policy));
  pkv_error detail = {PKV_OK, NULL, {0}};
  pkv_buffer file;
  pkv_buffer_init(&file, 2 * BYTES, &sched->allocator);
  pkv_status status = pkv_buffer_read_file(&file, path, &detail);
  if (status == PKV_E_LIMIT)
    status = PKV_FAIL(&detail, PKV_E_FORMAT, "%.100s: no learner's table, it is too large", path);
  if (status == PKV_OK)
    status = check(sched, (const unsigned char *)file.data, file.size, path, &detail);
  if (status == PKV_OK)
    decode(sched->learner, (const unsigned char *)file.data);
  else
    pkv_log(PKV_LOG_WARN, "sched", "%s: the %s policy keeps the table it has", detail.text,
            pkv_sched_policy_name(sched->o.policy));
  pkv_buffer_deinit(&file);
  if (status != PKV_OK && err != NULL) *err = detail;
  return status;
}
