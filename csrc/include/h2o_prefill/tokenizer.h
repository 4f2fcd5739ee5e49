// Text to token ids and back, by the tokenizer that `h2o-prefill export` writes beside a package.
//
//   const h2o_prefill::Tokenizer tokenizer("model.tokenizer");
//   h2o_prefill::TextStream text(tokenizer);
//   session.generate(tokenizer.chat("Who are you?"), {}, sampler, [&](int64_t token) {
//     std::cout << text.put(token) << std::flush;
//     return !text.stopped();
//   });
//   std::cout << text.end();
//
// A component of the CMake package, find_package(H2OPrefill COMPONENTS text), whose target
// H2OPrefill::text brings OpenVINO and its tokenizers: they run the model's tokenizer.json, which
// openvino_tokenizers has converted. All of it stands in this header, so the library itself needs
// neither.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <openvino/openvino.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#ifndef H2O_OPENVINO_TOKENIZERS  // the path of the library of openvino_tokenizers
#error "tokenizer.h needs the target H2OPrefill::text of find_package(H2OPrefill COMPONENTS text)"
#endif

namespace h2o_prefill {

// For any number of threads at a time.
class Tokenizer {
 public:
  // folder: a package's FILE.tokenizer. extension: the library of openvino_tokenizers. Throws
  // c10::ValueError, in one line, if the folder has no tokenizer for C++.
  explicit Tokenizer(const std::string& folder,
                     const std::string& extension = H2O_OPENVINO_TOKENIZERS) {
    try {
      ov::Core core;
      core.add_extension(extension);
      const auto model = core.read_model(whole_file(folder, "tokenizer"));
      const auto text = [&](const char* name) {
        return model->get_rt_info<std::string>("h2o_prefill", name);
      };
      std::istringstream prefix(text("prefix"));
      prefix_.assign(std::istream_iterator<int64_t>(prefix), {});
      chat_ = {text("chat_begin"), text("chat_next"), text("chat_end")};
      // One thread: texts are small, and threads of its own would stand beside PyTorch's.
      const ov::AnyMap threads = {ov::inference_num_threads(1)};
      encoder_ = core.compile_model(model, "CPU", threads);
      decoder_ = core.compile_model(whole_file(folder, "detokenizer"), "CPU", threads);
    } catch (const ov::Exception&) {
      TORCH_CHECK_VALUE(false, "OpenVINO ", ov::get_openvino_version().buildNumber,
                        " cannot run the tokenizer in ", folder, " by ", extension,
                        ": export the model with this version of openvino-tokenizers");
    }
  }

  // Token ids, int64 [1, T], of a text in UTF-8, equal to Hugging Face's, with the special tokens
  // that its tokenizer puts in front.
  at::Tensor encode(const std::string& text) const {
    const at::Tensor ids = ids_of(text);
    return prefix_.empty() ? ids : at::cat({at::tensor(prefix_).unsqueeze(0), ids}, 1);
  }

  // Ids of a user's message, as the model's chat template words it up to where the answer begins,
  // but with the blanks around the message, which some templates strip; next: after the tokens of
  // an answer of the same session. Throws c10::ValueError if the model has no chat template.
  at::Tensor chat(const std::string& message, bool next = false) const {
    TORCH_CHECK_VALUE(!chat_[0].empty() || !chat_[2].empty(),
                      "the model has no chat template: use encode()");
    return ids_of(chat_[next ? 1 : 0] + message + chat_[2]);
  }

  // The text of token ids without special tokens, valid UTF-8: U+FFFD stands for bytes that are
  // not.
  std::string decode(const std::vector<int64_t>& token_ids) const {
    if (token_ids.empty()) return "";
    auto request = decoder_.create_infer_request();
    request.set_input_tensor(ov::Tensor(ov::element::i64, {1, token_ids.size()}, token_ids.data()));
    request.infer();
    return request.get_output_tensor().data<std::string>()[0];
  }

 private:
  // OpenVINO would try to read another file as a model of TensorFlow, ONNX and others.
  static std::string whole_file(const std::string& folder, const std::string& name) {
    const std::string path = folder + "/openvino_" + name + ".xml";
    std::ifstream file(path, std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    TORCH_CHECK_VALUE(text.starts_with("<?xml") && text.ends_with("</net>\n"),
                      "there is no tokenizer for C++ in ", folder,
                      ", where `h2o-prefill export` writes one if openvino-tokenizers is "
                      "installed, or it was cut");
    return path;
  }

  at::Tensor ids_of(std::string text) const {
    auto request = encoder_.create_infer_request();
    request.set_input_tensor(ov::Tensor(ov::element::string, {1}, &text));
    request.infer();
    ov::Tensor ids = request.get_tensor("input_ids");
    return at::from_blob(ids.data(), {1, static_cast<int64_t>(ids.get_size())}, at::kLong).clone();
  }

  // Models of OpenVINO are thread-safe, but making a request is not const.
  mutable ov::CompiledModel encoder_, decoder_;
  std::vector<int64_t> prefix_;    // special tokens before a text
  std::vector<std::string> chat_;  // before the first message, before a later one, after either
};

// The text of an answer while its tokens come, in pieces of valid UTF-8.
class TextStream {
 public:
  // stops: texts that end the answer and are no part of it, wherever tokens begin and end.
  explicit TextStream(const Tokenizer& tokenizer, std::vector<std::string> stops = {})
      : tokenizer_(tokenizer), stops_(std::move(stops)) {}

  // Adds a token. Returns the text that is certain now: bytes of an incomplete character, and a
  // possible beginning of a stop, wait for later tokens.
  std::string put(int64_t token) {
    tokens_.push_back(token);
    return take(/*all=*/false);
  }

  // The rest, after the last token.
  std::string end() { return take(/*all=*/true); }

  // Whether a stop has come.
  bool stopped() const { return stopped_; }

 private:
  std::string take(bool all) {
    if (stopped_) return "";
    // Tokens before `context_` are done. A tokenizer may drop the space before the first token, so
    // the others stand in front when later ones are decoded.
    const std::string whole = tokenizer_.decode(tokens_);
    const bool complete = !whole.ends_with("\xEF\xBF\xBD");
    if (!all && !complete) return "";
    pending_ += whole.substr(std::min(shown_.size(), whole.size()));
    if (complete && whole.size() > shown_.size()) {
      tokens_.erase(tokens_.begin(), tokens_.begin() + context_);
      context_ = tokens_.size();
      shown_ = tokenizer_.decode(tokens_);
    }
    size_t certain = pending_.size();
    for (const std::string& stop : stops_) {
      const size_t found = pending_.find(stop);
      stopped_ |= found != std::string::npos;
      certain = std::min(certain, found);
      for (size_t n = std::min(stop.size(), pending_.size()); !all && n > 0; --n) {
        if (!pending_.ends_with(stop.substr(0, n))) continue;
        certain = std::min(certain, pending_.size() - n);
        break;
      }
    }
    std::string text = pending_.substr(0, certain);
    pending_.erase(0, certain);
    if (all) {
      tokens_.clear();
      shown_.clear();
      context_ = 0;
    }
    return text;
  }

  const Tokenizer& tokenizer_;
  std::vector<std::string> stops_;
  std::vector<int64_t> tokens_;  // the last ones
  size_t context_ = 0;           // of these, the ones whose text is in pending_ or was returned
  std::string shown_;            // their text
  std::string pending_;          // text that was not returned yet
  bool stopped_ = false;
};

}  // namespace h2o_prefill
