#include "common/overlap.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace h2o_prefill {
namespace {

// `step` times a number from 0 to `most`.
struct Term {
  int64_t step;
  int64_t most;
};

// Whether one multiple of each term can be chosen so that all add up to `target`. Steps are
// positive. The search is exact for layouts of tensors, whose steps span those of smaller ones; it
// gives up on others, and then says yes.
class Sum {
 public:
  explicit Sum(std::vector<Term> terms) : terms_(std::move(terms)) {
    std::sort(terms_.begin(), terms_.end(),
              [](const Term& a, const Term& b) { return a.step > b.step; });
    rest_.assign(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i-- > 0;) {
      rest_[i] = rest_[i + 1] + terms_[i].step * terms_[i].most;
    }
  }

  bool reaches(int64_t target, size_t term = 0) {
    if (target < 0 || target > rest_[term]) return false;
    if (term == terms_.size() || --trials_ < 0) return true;
    const auto [step, most] = terms_[term];
    const int64_t least = std::max<int64_t>(0, (target - rest_[term + 1] + step - 1) / step);
    for (int64_t n = std::min(most, target / step); n >= least; --n) {
      if (reaches(target - n * step, term + 1)) return true;
    }
    return false;
  }

 private:
  std::vector<Term> terms_;
  std::vector<int64_t> rest_;  // the most that the terms from each on add up to
  int trials_ = 100000;
};

// The dimensions of a tensor that has elements, in bytes.
std::vector<Term> dims(const at::Tensor& t) {
  std::vector<Term> all;
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1) {
      all.push_back({t.stride(i) * static_cast<int64_t>(t.itemsize()), t.size(i) - 1});
    }
  }
  return all;
}

// From the first byte of a tensor to its last.
int64_t extent(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += t.stride(i) * (t.size(i) - 1);
  return (last + 1) * static_cast<int64_t>(t.itemsize()) - 1;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.device() != b.device()) return false;
  const auto first_a = reinterpret_cast<intptr_t>(a.const_data_ptr());
  const auto first_b = reinterpret_cast<intptr_t>(b.const_data_ptr());
  if (first_a == 0 || first_b == 0) return false;
  const int64_t extent_b = extent(b);
  if (first_a > first_b + extent_b || first_b > first_a + extent(a)) return false;
  // A byte of each at one address: first_a + sum_a = first_b + sum_b. Offsets of b count from its
  // last byte, so that all terms are added.
  std::vector<Term> terms{{1, static_cast<int64_t>(a.itemsize()) - 1},
                          {1, static_cast<int64_t>(b.itemsize()) - 1}};
  for (const at::Tensor& t : {a, b}) {
    for (const Term& dim : dims(t)) {
      if (dim.step == 0) continue;
      const auto same = std::find_if(terms.begin(), terms.end(),
                                     [&](const Term& term) { return term.step == dim.step; });
      if (same == terms.end()) {
        terms.push_back(dim);
      } else {
        same->most += dim.most;
      }
    }
  }
  return Sum(std::move(terms)).reaches(first_b - first_a + extent_b);
}

bool overlaps_itself(const at::Tensor& t) {
  if (t.is_non_overlapping_and_dense() || t.numel() == 0) return false;
  const auto all = dims(t);
  // Two elements that differ in dimension i, and in no dimension before it, at one address.
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].step == 0) return true;
    std::vector<Term> terms{{all[i].step, all[i].most - 1}};
    int64_t target = -all[i].step;
    for (size_t j = i + 1; j < all.size(); ++j) {
      if (all[j].step == 0) return true;
      terms.push_back({all[j].step, 2 * all[j].most});
      target += all[j].step * all[j].most;
    }
    if (Sum(std::move(terms)).reaches(target)) return true;
  }
  return false;
}

}  // namespace

void check_no_internal_overlap(const NamedTensor& written) {
  TORCH_CHECK_VALUE(!overlaps_itself(written.tensor), written.name,
                    " must have every element at an address of its own, since it is written in "
                    "place; clone() it: got shape ",
                    written.tensor.sizes(), " with strides ", written.tensor.strides());
}

void check_no_overlap(const NamedTensor& written, std::initializer_list<NamedTensor> others) {
  for (const NamedTensor& other : others) {
    TORCH_CHECK_VALUE(!overlap(written.tensor, other.tensor), other.name,
                      " must not share memory with ", written.name,
                      ", which is written in place; clone() one of them");
  }
}

}  // namespace h2o_prefill
