/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Non-negative least squares by coordinate descent on the normal equations: with a dozen features
 * they are small, well scaled columns make it converge, and it cannot leave the feasible set.
 * The ridge is 1e-9 of a column's square: it only decides between columns that are multiples.
 */
#include "policy/cost.h"

#include <math.h>
#include <string.h>

#include "base/status.h"

#define N           PKV_COST_FEATURES
#define MOST_SWEEPS 200000
#define SMALLEST    1e-10 /* a sweep whose largest step is below this ends the fit */
#define RIDGE       1e-9

typedef struct normal {
  double a[N][N], b[N], scale[N];
} normal;

static pkv_status sum_up(normal *s, const double *features, const double *us, int32_t points,
                         uint32_t mask, pkv_error *err) {
  memset(s, 0, sizeof *s);
  for (int32_t p = 0; p < points; p++) {
    double row[N];
    PKV_CHECK(err, isfinite(us[p]) && us[p] > 0, PKV_E_INVALID, "us[%d] is %g", p, us[p]);
    for (int32_t i = 0; i < N; i++) {
      const double x = features[(int64_t)p * N + i];
      PKV_CHECK(err, isfinite(x) && x >= 0, PKV_E_INVALID, "features[%d] %s is %g", p,
                pkv_cost_feature_name(i), x);
      row[i] = (mask >> i & 1u) ? x / us[p] : 0;
    }
    for (int32_t i = 0; i < N; i++) {
      s->b[i] += row[i];
      for (int32_t j = 0; j < N; j++)
        s->a[i][j] += row[i] * row[j];
    }
  }
  for (int32_t i = 0; i < N; i++)
    s->scale[i] = s->a[i][i] > 0 ? sqrt(s->a[i][i]) : 0;
  for (int32_t i = 0; i < N; i++) {
    if (s->scale[i] == 0) continue;
    s->b[i] /= s->scale[i];
    for (int32_t j = 0; j < N; j++)
      if (s->scale[j] > 0) s->a[i][j] /= s->scale[i] * s->scale[j];
  }
  return PKV_OK;
}

pkv_status pkv_cost_fit(double *coefficients, const double *features, const double *us,
                        int32_t points, uint32_t mask, pkv_error *err) {
  normal s;
  double x[N] = {0};
  PKV_CHECK(err, coefficients && features && us, PKV_E_INVALID, "%s is NULL",
            !coefficients ? "coefficients"
            : !features   ? "features"
                          : "us");
  PKV_CHECK(err, points >= 1, PKV_E_INVALID, "points is %d, at least 1 is needed", points);
  PKV_TRY(sum_up(&s, features, us, points, mask, err));
  for (int32_t sweep = 0; sweep < MOST_SWEEPS; sweep++) {
    double largest = 0;
    for (int32_t i = 0; i < N; i++) {
      if (s.scale[i] == 0) continue;
      double gradient = s.b[i] - RIDGE * x[i];
      for (int32_t j = 0; j < N; j++)
        if (s.scale[j] > 0) gradient -= s.a[i][j] * x[j];
      const double next = x[i] + gradient > 0 ? x[i] + gradient : 0;
      if (fabs(next - x[i]) > largest) largest = fabs(next - x[i]);
      x[i] = next;
    }
    if (largest < SMALLEST) break;
  }
  for (int32_t i = 0; i < N; i++)
    coefficients[i] = s.scale[i] > 0 ? x[i] / s.scale[i] : 0;
  return PKV_OK;
}
