/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products by cuBLASLt, which is loaded when a model asks for products: a program without it
   runs, too. The algorithm for a shape is picked once. */
#ifndef PKV_CUDA_PRODUCTS_H
#define PKV_CUDA_PRODUCTS_H

#include "backend/cuda/cuda_state.h"
#include "backend/product_choices.h"

#ifdef __cplusplus
extern "C" {
#endif

/* E_UNSUPPORTED where the library is missing or too old; the text says what was looked for. */
pkv_status pkv_cuda_products_create(pkv_cuda_products **out, pkv_executor *executor,
                                    pkv_error *err);
void pkv_cuda_products_destroy(pkv_cuda_products *products, pkv_executor *executor);
/* y = x w^T, or y +=; the gate is not looked at: y is [m, n]. */
pkv_status pkv_cuda_products_run(pkv_cuda_products *products, pkv_executor *executor,
                                 const pkv_dense_matmul_params *p, cudaStream_t stream,
                                 pkv_error *err);
/* The same of packed weights (dense_pack.h), which are written out a slice of rows at a time. */
pkv_status pkv_cuda_products_run_packed(pkv_cuda_products *products, pkv_executor *executor,
                                        const pkv_dense_matmul_params *p, cudaStream_t stream,
                                        pkv_error *err);

/* As device_ops.h has them. */
void pkv_cuda_products_maker(char maker[PKV_PRODUCT_MAKER], const pkv_cuda_products *products,
                             pkv_executor *executor);
void pkv_cuda_products_take(pkv_cuda_products *products, const pkv_product_choice *choices,
                            int32_t count);
int32_t pkv_cuda_products_list(pkv_product_choice out[PKV_PRODUCT_CHOICES], int32_t *timed,
                               const pkv_cuda_products *products);

#ifdef __cplusplus
}
#endif
#endif
