/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that is none: device.h's table of functions over host memory, with the CPU backend
 * behind it. What only the host side decides (checks, ownership, failures half-way) and the GPU
 * tests themselves run on it anywhere, sanitizers included.
 */
#ifndef PKV_TEST_FAKE_DEVICE_H
#define PKV_TEST_FAKE_DEVICE_H

#include <stdbool.h>

#include "pkv/device.h"

/* The next fake_device_create's; single-threaded. */
typedef struct fake_device {
  int32_t live;    /* allocations not freed yet */
  int32_t calls;   /* calls that could have failed */
  int32_t fail_at; /* this call fails, counted from 1; 0 = none */
  bool fail_on;    /* and so do all after it */
  int32_t graph_launches;
  int32_t samples;        /* 1: the device samples */
  int32_t prefills;       /* 1: the device has a kernel for prompts ... */
  int32_t chunks;         /* ... and so many chunks went through it */
  int32_t packs;          /* n > 0: quantised weights stay so for less than n rows */
  int32_t spoilt;         /* embeddings of this token are NaN; 0 = none */
  int32_t fail_copies_of; /* copies of so many bytes fail; 0 = none */
  const char *maker;      /* of its products; NULL: it keeps nothing about them */
  int32_t measured;       /* products whose shape it did not know */
  int32_t advances;       /* steps whose inputs came from the one before */
  bool fail_copied_rows;  /* copies of rows fail */
  int64_t copied_rows;    /* those that did not */
  size_t pinned_bytes;    /* host memory that may be pinned; 0 = any */
  size_t free_bytes;      /* what the device says; 16 GiB at first */
  int32_t sums;           /* norms of groups */
  int32_t reaches;        /* 1: ranks reach each other's memory ... */
  int32_t gathered;       /* ... and so often the leader gathered logits */
} fake_device;
extern fake_device fake_device_state;

/* Streams that capture: what is captured is not run, a graph runs it as often as wanted, with what
   the memory it names then holds. Copies and append inside a capture are not supported. */
typedef struct fake_stream fake_stream;
typedef struct fake_graph fake_graph;
fake_stream *fake_stream_create(void);
void fake_stream_destroy(fake_stream *stream);
void fake_capture_begin(fake_stream *stream);
fake_graph *fake_capture_end(fake_stream *stream);
pkv_status fake_graph_launch(const fake_graph *graph, pkv_error *err);
void fake_graph_destroy(fake_graph *graph);

/* An executor with device functions; pkv_executor_destroy ends it. fake_device_state is reset. */
pkv_executor *fake_device_create(void);
/* One more, of the same state: another rank. */
pkv_executor *fake_device_another(void);

#endif
