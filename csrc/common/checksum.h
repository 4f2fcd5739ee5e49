// A checksum of tensors, which session files and the hashes of models are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace h2o_prefill {

// The checksum of bytes: it sees every flipped bit and the order of all words, and is no
// protection against forgery. Eight lanes take the 64-bit words (little-endian; zeros fill the
// last ones) of each MiB in turn, lane = mix(lane, word) from 0 on; then hash = mix(hash, lane)
// over the lanes of all pieces in order, from hash = the number of bytes on, where
// mix(h, w) = (x = (h ^ w) * 0x9E3779B97F4A7C15, x ^ (x >> 32)). Any number of threads gives the
// same.
uint64_t checksum(const void* data, size_t bytes);

// The checksum of a tensor's elements in row-major order.
uint64_t checksum(const at::Tensor& t);

// One checksum of two, in this order.
uint64_t combined_checksum(uint64_t first, uint64_t second);

}  // namespace h2o_prefill
