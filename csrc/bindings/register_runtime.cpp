// Packages, their sessions and samplers, and session files as torch.classes.h2o_prefill.*, for
// Python.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "common/atomic_file.h"
#include "common/checksum.h"
#include "h2o_prefill/package_session.h"
#include "h2o_prefill/sampler.h"
#include "h2o_prefill/session_file.h"

namespace h2o_prefill {
namespace {

using torch::arg;

struct SamplerHolder : torch::CustomClassHolder {
  explicit SamplerHolder(const SamplerOptions& options) : sampler(options) {}
  Sampler sampler;
};

void register_sampler(torch::Library& m) {
  m.class_<SamplerHolder>("Sampler")
      .def(torch::init([](double temperature, int64_t top_k, double top_p, double min_p,
                          double penalty, int64_t seed) {
             return c10::make_intrusive<SamplerHolder>(
                 SamplerOptions{.temperature = temperature,
                                .top_k = top_k,
                                .top_p = top_p,
                                .min_p = min_p,
                                .penalty = penalty,
                                .seed = static_cast<uint64_t>(seed)});
           }),
           "Chooses the next token as `generate` of transformers does; temperature 0: the "
           "likeliest.",
           {arg("temperature") = 0.0, arg("top_k") = 0, arg("top_p") = 1.0, arg("min_p") = 0.0,
            arg("penalty") = 1.0, arg("seed") = 0})
      .def("next",
           [](const c10::intrusive_ptr<SamplerHolder>& self, const at::Tensor& token_ids,
              const at::Tensor& logits) { return self->sampler.next(token_ids, logits); },
           "Return the token after token_ids, int64 [1, T], from logits [1, vocabulary].",
           {arg("token_ids"), arg("logits")});
}

struct PackageSessionHolder : torch::CustomClassHolder {
  PackageSessionHolder(const std::string& path, bool checkpoints)
      : session(std::make_shared<const Package>(path), checkpoints) {}
  PackageSession session;
};

// Keeps the session of an answer alive.
struct AnswerHolder : torch::CustomClassHolder {
  AnswerHolder(c10::intrusive_ptr<PackageSessionHolder> of, const at::Tensor& token_ids,
               const GenerateOptions& options, c10::intrusive_ptr<SamplerHolder> by)
      : session(std::move(of)),
        sampler(std::move(by)),
        answer(session->session, token_ids, options, sampler->sampler) {}
  c10::intrusive_ptr<PackageSessionHolder> session;
  c10::intrusive_ptr<SamplerHolder> sampler;
  Answer answer;
};

void register_package_session(torch::Library& m) {
  using Self = c10::intrusive_ptr<PackageSessionHolder>;
  using Answering = c10::intrusive_ptr<AnswerHolder>;
  m.class_<AnswerHolder>("Answer")
      .def(
          "step", [](const Answering& self) { return self->answer.step(); },
          "Prefill a few chunks and return nothing, or return the next token.")
      .def(
          "ended", [](const Answering& self) { return self->answer.ended(); },
          "Return whether the answer is complete.")
      .def(
          "prefilled", [](const Answering& self) { return self->answer.prefilled(); },
          "Return how many tokens of the prompt are prefilled.")
      .def(
          "tokens", [](const Answering& self) { return self->answer.tokens(); },
          "Return the tokens of the answer so far.");
  m.class_<PackageSessionHolder>("PackageSession")
      .def(torch::init([](const std::string& path, bool checkpoints) {
             return c10::make_intrusive<PackageSessionHolder>(path, checkpoints);
           }),
           "A package that h2o-prefill export wrote, and one text of it.",
           {arg("path"), arg("checkpoints") = false})
      .def("checkpoint_before",
           [](const Self& self, int64_t length) { return self->session.checkpoint_before(length); },
           "Return the last length, up to this one, to which truncate is exact.", {arg("length")})
      .def("truncate", [](const Self& self, int64_t length) { self->session.truncate(length); },
           "Remove the tokens after the first `length`.", {arg("length")})
      .def("forward",
           [](const Self& self, const at::Tensor& token_ids, const at::Tensor& rows) {
             return self->session.forward(token_ids, rows);
           },
           "Run the next tokens, int64 [1, T]; return the logits of rows, int64 [R].",
           {arg("token_ids"), arg("rows")})
      .def("answer",
           [](const Self& self, const at::Tensor& token_ids, int64_t max_new_tokens,
              int64_t draft_tokens, const c10::intrusive_ptr<SamplerHolder>& sampler) {
             return c10::make_intrusive<AnswerHolder>(
                 self, token_ids,
                 GenerateOptions{.max_new_tokens = max_new_tokens, .draft_tokens = draft_tokens},
                 sampler);
           },
           "Return the answer to a prompt, int64 [1, T], which its steps make.",
           {arg("token_ids"), arg("max_new_tokens"), arg("draft_tokens"), arg("sampler")})
      .def(
          "state", [](const Self& self) { return self->session.state(); },
          "Return the tensors of the state, which change with every call.")
      .def("save", [](const Self& self, const std::string& path) { self->session.save(path); },
           "Write the text into a session file.", {arg("path")})
      .def("load",
           [](const Self& self, const std::string& path, bool verify) {
             self->session.load(path, verify);
           },
           "Replace the text by a session file's; verify its checksum.",
           {arg("path"), arg("verify") = true});
}

struct SessionHolder : torch::CustomClassHolder {
  explicit SessionHolder(SessionFile held) : session(std::move(held)) {}
  const SessionFile session;
};
using Tensors = c10::Dict<std::string, at::Tensor>;

void register_session_file(torch::Library& m) {
  using Self = c10::intrusive_ptr<SessionHolder>;
  m.class_<SessionHolder>("SessionFile")
      .def(torch::init([](const std::string& model, const std::string& settings, int64_t length,
                          const Tensors& tensors) {
             SessionFile session{.model = model, .settings = settings, .length = length};
             for (const auto& entry : tensors) session.tensors[entry.key()] = entry.value();
             return c10::make_intrusive<SessionHolder>(std::move(session));
           }),
           "What a session file holds; docs/cpp.md has the names of its tensors.",
           {arg("model"), arg("settings"), arg("length"), arg("tensors")})
      .def("write",
           [](const Self& self, const std::string& path) {
             write_session_file(path, self->session);
           },
           "Write a session file whole or not at all.", {arg("path")})
      .def_static(
          "read",
          [](const std::string& path, bool verify) {
            return c10::make_intrusive<SessionHolder>(read_session_file(path, verify));
          },
          "Read a session file; its tensors are a private memory map of it.")
      .def_static(
          "checksum", [](const at::Tensor& x) { return static_cast<int64_t>(checksum(x)); },
          "Return the checksum of a tensor's elements.")
      .def("check_model",
           [](const Self& self, const std::string& wanted) { self->session.check_model(wanted); },
           "Refuse a session of another model, and name what differs.", {arg("wanted")})
      .def("check_settings",
           [](const Self& self, const std::string& wanted) {
             self->session.check_settings(PrefillConfig::parse(wanted));
           },
           "Refuse a session of other settings.", {arg("wanted")})
      .def(
          "header",
          [](const Self& self) {
            const SessionFile& held = self->session;
            return std::make_tuple(held.model, held.settings, held.length, held.version);
          },
          "Return what tells the model from others, all fields of the settings, the number of "
          "tokens, and the version of the format.")
      .def(
          "tensors",
          [](const Self& self) {
            Tensors tensors;
            for (const auto& [name, tensor] : self->session.tensors) tensors.insert(name, tensor);
            return tensors;
          },
          "Return the tensors by name.");
}

struct AtomicFileHolder : torch::CustomClassHolder {
  explicit AtomicFileHolder(const std::string& path) : file(path) {}
  AtomicFile file;
};

void register_atomic_file(torch::Library& m) {
  using Self = c10::intrusive_ptr<AtomicFileHolder>;
  m.class_<AtomicFileHolder>("AtomicFile")
      .def(torch::init(
               [](const std::string& path) { return c10::make_intrusive<AtomicFileHolder>(path); }),
           "A scratch file in the folder of a file, which takes its place at the end.",
           {arg("path")})
      .def(
          "scratch", [](const Self& self) { return self->file.scratch(); },
          "Return the path of the scratch file.")
      .def(
          "commit", [](const Self& self) { self->file.commit(); }, "Replace the file.")
      .def(
          "discard", [](const Self& self) { self->file.discard(); },
          "Remove the scratch file unless it has replaced the file.");
}

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  register_atomic_file(m);
  register_sampler(m);
  register_package_session(m);
  register_session_file(m);
}

}  // namespace
}  // namespace h2o_prefill
