# The only list of sources. Every build of the library, with or without CUDA, reads it.

# The same for every device.
set(H2O_HOST_SOURCES
    bindings/library.cpp
    bindings/register_classes.cpp
    bindings/register_layer_state.cpp
    bindings/register_runtime.cpp
    common/checks.cpp
    common/config.cpp
    common/crossover.cpp
    common/linear_attention_request.cpp
    common/memory_sets.cpp
    common/paged_request.cpp
    common/prefill_request.cpp
    common/rules.cpp
    common/tensors.cpp
    core/chunk_manager.cpp
    core/chunked_kv_cache.cpp
    core/chunked_sparse_attention.cpp
    core/layer_state.cpp
    core/layer_state_tensors.cpp
    core/memory_set_tracker.cpp
    core/prefill_context.cpp
    core/session.cpp
    kernels/composite/accumulate_scores.cpp
    kernels/composite/advance_position.cpp
    kernels/composite/attend.cpp
    kernels/composite/chunked_sparse_attention.cpp
    kernels/composite/chunkwise_linear_attention.cpp
    kernels/composite/dense_attention.cpp
    kernels/composite/error_rows.cpp
    kernels/composite/gather_rows.cpp
    kernels/composite/intra_chunk_attention.cpp
    kernels/composite/linear_scan.cpp
    kernels/composite/memory_attention.cpp
    kernels/composite/merge_states.cpp
    kernels/composite/packed_linear.cpp
    kernels/composite/recall_at_position.cpp
    kernels/composite/select_memory.cpp
    ops/accumulate_scores.cpp
    ops/advance_position.cpp
    ops/chunked_sparse_attention.cpp
    ops/chunkwise_linear_attention.cpp
    ops/chunkwise_linear_attention_autograd.cpp
    ops/dense_attention.cpp
    ops/gather_rows.cpp
    ops/inference_only.cpp
    ops/intra_chunk_attention.cpp
    ops/lexical_recall.cpp
    ops/linear.cpp
    ops/memory_attention.cpp
    ops/merge_states.cpp
    ops/pack_linear.cpp
    ops/packed_embedding.cpp
    ops/paged_sparse_attention.cpp
    ops/prefill_attention.cpp
    ops/recall_at_position.cpp
    ops/select_memory.cpp
    ops/sliding_window_attention.cpp
    runtime/package.cpp
    runtime/package_files.cpp
    runtime/sampler.cpp
    runtime/package_session.cpp)

set(H2O_CPU_SOURCES
    kernels/cpu/accumulate_scores_kernel.cpp
    kernels/cpu/amx_gemm.cpp
    kernels/cpu/attend_chunk.cpp
    kernels/cpu/chunked_sparse_attention_kernel.cpp
    kernels/cpu/chunkwise_linear_attention_kernel.cpp
    kernels/cpu/dense_attention_kernel.cpp
    kernels/cpu/gather_rows_kernel.cpp
    kernels/cpu/intra_chunk_attention_kernel.cpp
    kernels/cpu/isa_dispatch.cpp
    kernels/cpu/lexical_recall_kernel.cpp
    kernels/cpu/linear_kernel.cpp
    kernels/cpu/memory_attention_kernel.cpp
    kernels/cpu/error_rows.cpp
    kernels/cpu/memory_set_updater.cpp
    kernels/cpu/merge_states_kernel.cpp
    kernels/cpu/select_memory_kernel.cpp
    kernels/cpu/workspace.cpp)

# Compiled once per instruction set, without a PyTorch header (see cmake/isa.cmake).
set(H2O_ISA_SOURCES kernels/cpu/attend_rows.cpp kernels/cpu/attend_token.cpp kernels/cpu/linear_chunk.cpp
    kernels/cpu/linear_tokens.cpp kernels/cpu/packed_linear.cpp)

# Of builds with CUDA alone: kernels in .cu, operators in .cpp (see cmake/cuda.cmake).
set(H2O_CUDA_SOURCES
    kernels/cuda/attend_forward.cu
    kernels/cuda/attend_forward_sm90.cu
    kernels/cuda/attention_passes.cpp
    kernels/cuda/chunk_end.cu
    kernels/cuda/chunked_sparse_attention_kernel.cpp
    kernels/cuda/column_sums.cu
    kernels/cuda/column_sums_sm90.cu
    kernels/cuda/cuda_kernels.cpp
    kernels/cuda/dense_attention_kernel.cpp
    kernels/cuda/error_rows.cu
    kernels/cuda/gather_pages.cu
    kernels/cuda/intra_chunk_attention_kernel.cpp
    kernels/cuda/lexical_recall_kernel.cpp
    kernels/cuda/memory_attention_kernel.cpp
    kernels/cuda/select_memory_kernel.cpp)

set(H2O_PYTHON_SOURCES bindings/python_module.cpp)
