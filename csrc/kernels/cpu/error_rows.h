// Errors of sparse attention, measured in a few rows of each chunk.
#pragma once

#include <vector>

#include "common/prefill_request.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {

// The rows of a call that error_row() names attend to every key before them, all of them before the
// first chunk, so that keys are packed once. After each chunk, its errors are recorded in the
// state.
class ErrorRows {
 public:
  // Plans its part of the workspace, which is allocated before anything else is called.
  ErrorRows(const PrefillRequest& request, Workspace& workspace);

  // Computes the exact results. call: the tensors and the scale.
  void attend(const AttentionCall& call) const;

  // rows: of a chunk whose sparse output is in call.out.
  void measure(const AttentionCall& call, const RowRange& rows) const;

 private:
  // A share of the keys of a unit, whose partial results one task computes.
  struct Share {
    int64_t unit;
    int64_t index;
    int64_t begin;
    int64_t end;
  };

  void attend_share(const AttentionCall& call, const Share& share, int64_t thread) const;
  // The mean over measured rows [first, end) of |sparse - exact|^2 / |exact|^2.
  double error(const AttentionCall& call, int64_t unit, int64_t first, int64_t end) const;

  // Results of all measured rows of a unit's query heads, by position: row i of head g of the group
  // is i * group + g.
  int64_t all_rows() const { return static_cast<int64_t>(rows_.size()) * group_; }
  int64_t result(int64_t unit, int64_t share) const {
    return (unit * shares_ + share) * all_rows();
  }

  const PrefillRequest& request_;
  const Workspace& workspace_;
  int64_t group_;
  std::vector<int64_t> rows_;  // of the call, ascending
  int64_t shares_;
  int64_t key_floats_;    // packed keys of a block
  int64_t value_floats_;  // packed values of a block
  int64_t thread_floats_;
  int64_t threads_;
  Workspace::Part<float> thread_parts_;  // packed keys and values, scratch
  Workspace::Part<float> thread_outs_;   // [threads, all_rows, Dv]: results of one block
  Workspace::Part<float> thread_lses_;   // [threads, all_rows]
  Workspace::Part<int32_t> limits_;      // [threads, all_rows]
  Workspace::Part<float> queries_;       // [units, all_rows, D], in the dtype of the query
  Workspace::Part<float> outs_;          // [units, shares, all_rows, Dv]
  Workspace::Part<float> lses_;          // [units, shares, all_rows]
};

}  // namespace h2o_prefill
