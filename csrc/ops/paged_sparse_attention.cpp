#include "ops/dispatch.h"

namespace h2o_prefill {

H2O_SCHEMA(
    "paged_sparse_attention_(Tensor q, Tensor key_pages, Tensor value_pages, Tensor page_table, "
    "int total, Tensor(a!) out, Tensor? memory, Tensor? scores, Tensor? errors, "
    "Tensor? recall_offsets, Tensor? recall_positions, Tensor? recall_visible_from, int layer, "
    "str settings, int checkpoints, float? scale=None) -> "
    "(Tensor memory, Tensor scores, Tensor errors)")

}  // namespace h2o_prefill
