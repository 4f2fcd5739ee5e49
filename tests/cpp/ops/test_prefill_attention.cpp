// prefill_attention_: where buffers lie, and what is refused before anything is written. Generated
// calls compare its results with prefill_attention.
#include <string>

#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

const char* const kSettings = "h2o,chunk_size=16,local_window=3,heavy_budget=4,sink_tokens=1";
constexpr int64_t kMemory = 8;

// One layer's buffers, and the position of its model. Rows that nothing wrote hold NaN.
struct Layer {
  explicit Layer(int64_t capacity = 100) : position(at::zeros({2}, at::kLong)) {
    buffers.key = at::full({2, 2, capacity, 8}, std::nan(""));
    buffers.value = at::full({2, 2, capacity, kValueDim}, std::nan(""));
    buffers.scores = at::zeros({2, 2, capacity});
    buffers.memory = at::full({2, 2, kMemory}, -1, at::kInt);
    buffers.errors = at::zeros({2, 2, kErrorFields});
  }

  at::Tensor attend(const Qkv& x, const std::string& settings = kSettings, int64_t layer = 0,
                    const RecallLists& recall = {}) {
    auto out = prefill_attention_(x.q, x.k, x.v, buffers, position, layer, settings, recall);
    advance_position_(position, x.q.size(2), settings);
    return out;
  }

  PrefillBuffers buffers;
  at::Tensor position;
};

TEST(PrefillAttentionInPlace, KeysThatAreInTheBufferAlreadyStayWhereTheyAre) {
  const auto x = random_qkv(60);
  Layer layer, expected;
  layer.buffers.key.narrow(2, 0, 60).copy_(x.k);
  layer.buffers.value.narrow(2, 0, 60).copy_(x.v);
  const Qkv in_place{x.q, layer.buffers.key.narrow(2, 0, 60), layer.buffers.value.narrow(2, 0, 60)};
  EXPECT_TRUE(same(layer.attend(in_place), expected.attend(x)));
}

void expect_buffers_of_any_strides(int64_t length) {
  const auto x = random_qkv(length);
  Layer plain(1300), strided(1300);
  plain.attend(x);
  auto& [key, value, scores, memory, errors] = strided.buffers;
  key = at::full({2, 1300, 2, 10}, std::nan("")).transpose(1, 2).narrow(3, 1, 8);
  value = at::full({2, 2, kValueDim, 1300}, std::nan("")).transpose(2, 3);
  strided.attend({x.q, by_token(x.k), by_dim(x.v)});
  EXPECT_TRUE(same(key.narrow(2, 0, length), x.k));
  EXPECT_TRUE(same(value.narrow(2, 0, length), x.v));
  EXPECT_TRUE(key.narrow(2, length, 1300 - length).isnan().all().item<bool>());
  EXPECT_TRUE(same(scores, plain.buffers.scores));
}

// Few and many tokens are written in different ways. The emulation leaves LongHistory out.
TEST(PrefillAttentionInPlace, KeysOfAnyStridesAreWrittenToBuffersOfAnyStrides) {
  expect_buffers_of_any_strides(3);
}
TEST(PrefillAttentionInPlace, LongHistoryIsWrittenToBuffersOfAnyStrides) {
  expect_buffers_of_any_strides(1200);
}

TEST(PrefillAttentionInPlace, KeysMayLieAcrossTheirPlace) {
  const auto x = random_qkv(20);
  Layer layer, expected;
  layer.attend(x);
  expected.attend(x);
  const auto q = x.q.narrow(2, 0, 15), v = x.v.narrow(2, 0, 15);
  // Of positions 10 to 24, for positions 20 to 34.
  layer.buffers.key.narrow(2, 20, 15).copy_(x.k.narrow(2, 0, 15));
  const auto across = layer.buffers.key.narrow(2, 10, 15);
  const auto copy = across.clone();
  EXPECT_TRUE(same(layer.attend({q, across, v}), expected.attend({q, copy, v})));
  EXPECT_TRUE(same(layer.buffers.key.narrow(2, 20, 15), copy));
}

TEST(PrefillAttentionInPlace, ADenseLayerNeedsNoScores) {
  const auto x = random_qkv(40);
  Layer layer;
  layer.buffers.scores = at::empty({2, 2, 0});
  layer.buffers.memory = at::empty({2, 2, 0}, at::kInt);
  const std::string settings = std::string(kSettings) + ",dense_layers=0";
  EXPECT_TRUE(close(layer.attend(x, settings), attend_causally(x).out));
  EXPECT_VALUE_ERROR_WITH(layer.attend(x.tokens(0, 16)), "scores must be contiguous with room");
}

TEST(PrefillAttentionInPlace, WrongArgumentsChangeNothing) {
  const auto x = random_qkv(40);
  Layer layer;
  layer.attend(x);
  const auto before = layer;
  const auto keys = layer.buffers.key.clone(), scores = layer.buffers.scores.clone();
  const auto wrong = [&](const char* message, auto&& change,
                         const std::string& settings = kSettings) {
    Layer changed = before;
    changed.position = before.position.clone();
    Qkv tokens = x;
    RecallLists recall;
    change(changed, tokens, recall);
    EXPECT_VALUE_ERROR_WITH(changed.attend(tokens, settings, 1, recall), message);
    EXPECT_TRUE(at::equal(layer.buffers.key.nan_to_num(), keys.nan_to_num())) << message;
    EXPECT_TRUE(same(layer.buffers.scores, scores)) << message;
  };
  using L = Layer;
  using R = RecallLists;
  wrong("cache_key must have room for the tokens before the call, 40, and its own, 40, got a capa",
        [](L& l, Qkv&, R&) {
          l.buffers.key = l.buffers.key.narrow(2, 0, 79);
          l.buffers.value = l.buffers.value.narrow(2, 0, 79);
        });
  wrong("scores must be contiguous with room for 80 tokens",
        [](L& l, Qkv&, R&) { l.buffers.scores = l.buffers.scores.narrow(2, 0, 80); });
  wrong("memory must be contiguous with room for K + L + H positions (8)",
        [](L& l, Qkv&, R&) { l.buffers.memory = l.buffers.memory.narrow(2, 0, 7).contiguous(); });
  wrong(
      "errors must be given and contiguous where the settings have error_rows",
      [](L& l, Qkv&, R&) {
        l.buffers.memory = at::full({2, 2, 15}, -1, at::kInt);
        l.buffers.errors = at::Tensor();
      },
      std::string(kSettings) + ",error_rows=4,max_widen=2");
  EXPECT_VALUE_ERROR(layer.attend(x, kSettings, -1), "layer must be >= 0, got -1");
  EXPECT_VALUE_ERROR(advance_position_(layer.position, -1, kSettings),
                     "num_tokens must be >= 0, got -1");
}

// Buffers whose keys and values have one width, and the arguments of a call.
struct Shared {
  at::Tensor q = at::randn({2, 2, 20, 8}), k = at::randn({2, 2, 20, 8}), v = k + 1;
  PrefillBuffers buffers{at::zeros({2, 2, 100, 8}), at::zeros({2, 2, 100, 8}),
                         at::zeros({2, 2, 100}), at::full({2, 2, kMemory}, -1, at::kInt)};
  at::Tensor position = at::zeros({2}, at::kLong);
  RecallLists recall = {};
  std::optional<at::Tensor> sinks = {};
  Checkpoints checkpoints = {};

  at::Tensor attend() {
    return prefill_attention_(q, k, v, buffers, position, 0, kSettings, recall, std::nullopt, sinks,
                              /*softcap=*/0.0, /*window=*/std::nullopt, checkpoints);
  }
};

TEST(PrefillAttentionInPlace, RefusesArgumentsThatShareMemory) {
  const auto refused = [](const char* message, auto&& change) {
    Shared shared;
    change(shared, shared.buffers);
    EXPECT_VALUE_ERROR_WITH(shared.attend(), message);
  };
  using S = Shared;
  using B = PrefillBuffers;
  refused("cache_value must not share memory with cache_key, which is written in place",
          [](S&, B& b) { b.value = b.key; });
  refused("cache_value must not share memory with cache_key", [](S&, B& b) {
    const auto rows = at::zeros({2, 2, 100, 12});
    b.key = rows.narrow(3, 0, 8);
    b.value = rows.narrow(3, 4, 8);
  });
  refused("cache_key must have every element at an address of its own",
          [](S&, B& b) { b.key = at::zeros({2, 1, 100, 8}).expand({2, 2, 100, 8}); });
  auto position = at::zeros({1}, at::kLong).expand({2});
  EXPECT_VALUE_ERROR_WITH(advance_position_(position, 1, kSettings),
                          "position must have every element at an address of its own");
}

// Every tensor that a call writes, the first eight, with every other one.
TEST(PrefillAttentionInPlace, RefusesPairsThatShareMemory) {
  for (size_t i = 0; i < 8; ++i) {
    for (size_t j = i + 1; j < 16; ++j) {
      if ((i == 0 && j == 12) || (i == 1 && j == 13)) continue;  // k and v may be views of these
      Shared x;
      const auto list = at::zeros({5}, at::kInt);
      x.sinks = at::zeros({2});
      x.buffers.errors = at::zeros({2, 2, kErrorFields});
      if (j >= 8 && j <= 10) x.recall = {list, list.clone(), list.clone()};
      x.checkpoints = {at::zeros({1, 2, 2, kMemory}, at::kInt), at::zeros({1, 2, 2, kMemory}),
                       at::zeros({1, 2, 2, kErrorFields})};
      const std::pair<const char*, at::Tensor*> all[]{
          {"cache_key", &x.buffers.key},
          {"cache_value", &x.buffers.value},
          {"scores", &x.buffers.scores},
          {"memory", &x.buffers.memory},
          {"errors", &x.buffers.errors},
          {"checkpoint_memory", &x.checkpoints.memory},
          {"checkpoint_scores", &x.checkpoints.scores},
          {"checkpoint_errors", &x.checkpoints.errors},
          {"recall_offsets", &x.recall.offsets},
          {"recall_positions", &x.recall.positions},
          {"recall_visible_from", &x.recall.visible_from},
          {"q", &x.q},
          {"k", &x.k},
          {"v", &x.v},
          {"position", &x.position},
          {"sinks", &x.sinks.value()}};
      const auto pool = at::zeros({1 << 14});
      for (at::Tensor* t : {all[i].second, all[j].second}) {
        *t = pool.narrow(0, 0, t->nbytes() / 4).view(t->scalar_type()).view(t->sizes());
      }
      EXPECT_VALUE_ERROR_WITH(x.attend(), c10::str(all[j].first, " must not share memory with ",
                                                   all[i].first, ", which is written"));
    }
  }
}

TEST(PrefillAttentionInPlace, BuffersMayBePartsOfOneTensor) {
  const auto part = [](const at::Tensor& whole, int64_t dim, int64_t i) {
    const int64_t size = whole.size(dim) / 2;
    return whole.narrow(dim, i * size, size);
  };
  Shared expected;
  const auto out = expected.attend();
  for (const int64_t dim : {0, 1, 2, 3}) {
    std::vector<int64_t> sizes{2, 2, 100, 8};
    sizes[dim] *= 2;
    for (const bool tokens_outermost : {false, true}) {
      auto whole = at::zeros(sizes);
      if (tokens_outermost) whole = by_token(whole);
      Shared shared{expected.q, expected.k, expected.v};
      shared.buffers.key = part(whole, dim, 0);
      shared.buffers.value = part(whole, dim, 1);
      EXPECT_TRUE(same(shared.attend(), out)) << "dimension " << dim;
      EXPECT_TRUE(same(shared.buffers.key, expected.buffers.key));
      EXPECT_TRUE(same(shared.buffers.value, expected.buffers.value));
    }
  }
}

TEST(PrefillAttentionInPlace, PositionOutOfRange) {
  const auto x = random_qkv(40);
  Layer layer;
  layer.attend(x);
  layer.buffers.memory.select(2, 0).fill_(50);
  EXPECT_VALUE_ERROR_WITH(layer.attend(x), "memory must be -1 or in [0, 40), got 50");
  layer.buffers.memory.copy_(positions({0, 3, 3, 4, -1, -1, -1, -1}, 2, 2));
  EXPECT_VALUE_ERROR_WITH(layer.attend(x), "memory must be strictly ascending, got 3 after 3");
}

}  // namespace
}  // namespace h2o_prefill::testing
