/* SPDX-License-Identifier: Apache-2.0 */
/* Devices of one host that add up. Where each can read the others' memory, a norm reads all sums
   itself (dense_group.cu); elsewhere NCCL adds them first, and is loaded when a group asks for it:
   a program without it runs, too. */
#ifndef PKV_CUDA_GROUP_H
#define PKV_CUDA_GROUP_H

#include "backend/device_dense.h"

/* As pkv_dense_ops says. */
pkv_status pkv_cuda_group_reaches(int32_t *reaches, pkv_executor *const *executors, int32_t count,
                                  pkv_error *err);
pkv_status pkv_cuda_group_create(void **out, pkv_executor *const *executors, int32_t count,
                                 int32_t rows, pkv_error *err);
void pkv_cuda_group_destroy(void *group);
pkv_status pkv_cuda_group_norm(void *group, const pkv_dense_norm_params *p, void *const *streams,
                               pkv_error *err);
pkv_status pkv_cuda_group_gather(void *group, void *const *streams, pkv_error *err);
pkv_status pkv_cuda_group_wait(void *group, void *const *streams, pkv_error *err);

#endif
