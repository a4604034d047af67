/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The learners. State: rows / 4 up to 10, chunks that the chain loses (-5 to 5), waiting sharers of
 * the new chain / 4 up to 10. Actions: add, stop. The reward of a step is rows a second.
 *
 * ucb: mean reward + c * sqrt(ln(n + 1) / n_a), n of the state, n_a of the action; what was never
 * tried is infinite, ties go to add. The shipped prior counts as prior_weight visits to each
 * action, with a mean of prior * (mean of all rewards so far): rewards have no fixed scale.
 *
 * q-learning: rewards are divided by their mean so far. Every decision since the last reward gets
 * it, and the state of the next decision counts as what follows, across batches, so that `stop` is
 * no dead end. Nothing of this is published; rate, discount and exploration are options. The prior
 * is the starting value, prior / (1 - discount).
 *
 * The prior says: an added row costs 5 % for each chunk that the chain loses, less where many wait
 * that share the new chain; stopping costs 30 % of a batch of less than 4 rows, and less of larger
 * ones. It is an estimate, not fitted; it keeps the first hundred decisions reasonable.
 */
#include "sched/sched_parts.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"

static int32_t clamp(int32_t x, int32_t low, int32_t high) {
  return x < low ? low : x > high ? high : x;
}

uint32_t pkv_sched_learner_state(int32_t rows, int32_t before, int32_t after, int32_t sharers) {
  const int32_t b = clamp(rows / 4, 0, 10), w = clamp(sharers / 4, 0, 10);
  const int32_t d = clamp(before - after, -5, 5) + 5;
  return (uint32_t)((b * 11 + d) * 11 + w);
}

static double prior(uint32_t state, uint32_t action) {
  const double w = state % 11, d = (double)(state / 11 % 11) - 5, b = state / 121;
  if (action == PKV_SCHED_STOP) return 1 - 0.3 / (1 + b);
  return d <= 0 ? 1 : 1 - 0.05 * d * (1 - w / 10);
}

static double mean_reward(const pkv_sched_learner *l) {
  return l->rewards > 0 ? l->reward_sum / l->rewards : 0;
}

void pkv_sched_learner_reset(pkv_sched *s) {
  pkv_sched_learner *l = s->learner;
  memset(l, 0, sizeof *l);
  if (s->o.policy != PKV_SCHED_Q_LEARNING || s->o.prior_weight == 0) return;
  /* discount 1 would need infinite values */
  const double horizon = s->o.q_discount < 0.99 ? 1 / (1 - s->o.q_discount) : 100;
  for (uint32_t i = 0; i < PKV_SCHED_STATES; i++)
    for (uint32_t a = 0; a < PKV_SCHED_ACTIONS; a++)
      l->arms[i][a].value = prior(i, a) * horizon;
}

static double ucb_score(const pkv_sched *s, uint32_t state, uint32_t action) {
  const pkv_sched_learner *l = s->learner;
  const pkv_sched_arm *arm = &l->arms[state][action];
  const double weight = s->o.prior_weight, n = arm->visits + weight;
  if (n <= 0) return INFINITY;
  const double all = l->arms[state][0].visits + l->arms[state][1].visits + 2 * weight;
  const double mean = (arm->value + weight * prior(state, action) * mean_reward(l)) / n;
  return mean + s->o.ucb_bonus * sqrt(log(all + 1) / n);
}

pkv_sched_verdict pkv_sched_learner_choose(const pkv_sched *s, uint32_t state) {
  const pkv_sched_learner *l = s->learner;
  double add, stop;
  if (s->o.policy == PKV_SCHED_UCB) {
    add = ucb_score(s, state, PKV_SCHED_ADD);
    stop = ucb_score(s, state, PKV_SCHED_STOP);
  } else {
    /* Drawn by number, so that asking again gives the same. */
    if (pkv_hash_uniform(s->o.seed, 1, l->decisions) < s->o.q_explore)
      return pkv_hash_uniform(s->o.seed, 2, l->decisions) < 0.5 ? PKV_SCHED_ADD : PKV_SCHED_STOP;
    add = l->arms[state][PKV_SCHED_ADD].value;
    stop = l->arms[state][PKV_SCHED_STOP].value;
  }
  return stop > add ? PKV_SCHED_STOP : PKV_SCHED_ADD;
}

void pkv_sched_learner_note(pkv_sched *s, uint32_t state, pkv_sched_verdict action) {
  pkv_sched_learner *l = s->learner;
  l->log[l->logged % PKV_SCHED_LOG] = (pkv_sched_step){(uint16_t)state, (uint8_t)action};
  l->logged++;
  l->decisions++;
}

static void q_update(const pkv_sched *s, pkv_sched_step step, double reward, uint32_t next) {
  pkv_sched_learner *l = s->learner;
  pkv_sched_arm *arm = &l->arms[step.state][step.action];
  const double a = l->arms[next][PKV_SCHED_ADD].value, b = l->arms[next][PKV_SCHED_STOP].value;
  arm->value += s->o.q_rate * (reward + s->o.q_discount * (a > b ? a : b) - arm->value);
  arm->visits++;
}

void pkv_sched_policy_reward(pkv_sched *s, int32_t rows, double seconds) {
  pkv_sched_learner *l = s->learner;
  if (l == NULL) return;
  const double reward = rows / seconds;
  if (!isfinite(reward)) return;
  l->reward_sum += reward;
  l->rewards++;
  const double mean = mean_reward(l);
  const uint64_t first = l->logged > PKV_SCHED_LOG ? l->logged - PKV_SCHED_LOG : 0;
  for (uint64_t i = first; i < l->logged; i++) {
    const pkv_sched_step step = l->log[i % PKV_SCHED_LOG];
    if (s->o.policy == PKV_SCHED_UCB) {
      l->arms[step.state][step.action].visits++;
      l->arms[step.state][step.action].value += reward;
      continue;
    }
    if (l->pending) q_update(s, l->last, l->last_reward, step.state);
    l->pending = true;
    l->last = step;
    l->last_reward = mean > 0 ? reward / mean : 1;
  }
  l->logged = 0;
}
