/* SPDX-License-Identifier: Apache-2.0 */
/* What the server says of itself: metrics, slots, properties, and what its page shows. */
#ifndef PKV_SERVER_REPLY_STATE_H
#define PKV_SERVER_REPLY_STATE_H

#include "server/http_parts.h"

/* Is the server ready? Why not, as one word: "loading", "failed", "stalled", "draining". */
const char *pkv_server_phase(const pkv_server *server, const pkv_loop_counters *counters);

/* Prometheus text. */
pkv_status pkv_reply_metrics(pkv_buffer *out, const pkv_server *server, pkv_error *err);
/* llama-server's: one entry a row of the batch, and one for each request that waits. */
pkv_status pkv_reply_slots(pkv_buffer *out, const pkv_server *server, pkv_error *err);
/* llama-server's. */
pkv_status pkv_reply_props(pkv_buffer *out, const pkv_server *server, pkv_error *err);
pkv_status pkv_reply_state(pkv_buffer *out, const pkv_server *server, pkv_error *err);

#endif
