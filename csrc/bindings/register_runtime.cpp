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
#include "common/holder.h"
#include "h2o_prefill/package_session.h"
#include "h2o_prefill/sampler.h"
#include "h2o_prefill/session_file.h"

namespace h2o_prefill {
namespace {

using torch::arg;

void register_sampler(torch::Library& m) {
  m.class_<Holder<Sampler>>("Sampler")
      .def(torch::init([](double temperature, int64_t top_k, double top_p, double min_p,
                          double penalty, int64_t seed) {
             return c10::make_intrusive<Holder<Sampler>>(
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
      .def("next", of(&Sampler::next),
           "Return the token after token_ids, int64 [1, T], from logits [1, vocabulary].",
           {arg("token_ids"), arg("logits")});
}

// Keeps the session and the sampler of an answer alive.
struct AnswerHolder : Holder<Answer> {
  AnswerHolder(const Held<PackageSession>& of, const at::Tensor& token_ids,
               const GenerateOptions& options, const Held<Sampler>& by)
      : Holder(of->held, token_ids, options, by->held), session(of), sampler(by) {}
  Held<PackageSession> session;
  Held<Sampler> sampler;
};

void register_package_session(torch::Library& m) {
  using Self = Held<PackageSession>;
  m.class_<Holder<Answer>>("Answer")
      .def("step", of(&Answer::step),
           "Prefill a few chunks and return nothing, or return the next token.")
      .def("ended", of(&Answer::ended), "Return whether the answer is complete.")
      .def("prefilled", of(&Answer::prefilled),
           "Return how many tokens of the prompt are prefilled.")
      .def("tokens", of(&Answer::tokens), "Return the tokens of the answer so far.");
  m.class_<Holder<PackageSession>>("PackageSession")
      .def(torch::init([](const std::string& path, bool checkpoints) {
             return c10::make_intrusive<Holder<PackageSession>>(
                 std::make_shared<const Package>(path), checkpoints);
           }),
           "A package that h2o-prefill export wrote, and one text of it.",
           {arg("path"), arg("checkpoints") = false})
      .def("checkpoint_before", of(&PackageSession::checkpoint_before),
           "Return the last length, up to this one, to which truncate is exact.", {arg("length")})
      .def("truncate", of(&PackageSession::truncate), "Remove the tokens after the first `length`.",
           {arg("length")})
      .def("forward",
           [](const Self& self, const at::Tensor& token_ids, const at::Tensor& rows) {
             return self->held.forward(token_ids, rows);
           },
           "Run the next tokens, int64 [1, T]; return the logits of rows, int64 [R].",
           {arg("token_ids"), arg("rows")})
      .def("answer",
           [](const Self& self, const at::Tensor& token_ids, int64_t max_new_tokens,
              int64_t draft_tokens, const Held<Sampler>& sampler) -> Held<Answer> {
             return c10::make_intrusive<AnswerHolder>(
                 self, token_ids,
                 GenerateOptions{.max_new_tokens = max_new_tokens, .draft_tokens = draft_tokens},
                 sampler);
           },
           "Return the answer to a prompt, int64 [1, T], which its steps make.",
           {arg("token_ids"), arg("max_new_tokens"), arg("draft_tokens"), arg("sampler")})
      .def("state", of(&PackageSession::state),
           "Return the tensors of the state, which change with every call.")
      .def("save", of(&PackageSession::save), "Write the text into a session file.", {arg("path")})
      .def("load", of(&PackageSession::load), "Replace the text by a session file's.",
           {arg("path")});
}

using Tensors = c10::Dict<std::string, at::Tensor>;

void register_session_file(torch::Library& m) {
  using Self = Held<SessionFile>;
  m.class_<Holder<SessionFile>>("SessionFile")
      .def(torch::init([](const std::string& model, const std::string& settings, int64_t length,
                          const Tensors& tensors) {
             SessionFile session{.model = model, .settings = settings, .length = length};
             for (const auto& entry : tensors) session.tensors[entry.key()] = entry.value();
             return c10::make_intrusive<Holder<SessionFile>>(std::move(session));
           }),
           "What a session file holds; docs/cpp.md has the names of its tensors.",
           {arg("model"), arg("settings"), arg("length"), arg("tensors")})
      .def("write",
           [](const Self& self, const std::string& path) { write_session_file(path, self->held); },
           "Write a session file whole or not at all.", {arg("path")})
      .def_static(
          "read",
          [](const std::string& path, bool verify) {
            return c10::make_intrusive<Holder<SessionFile>>(read_session_file(path, verify));
          },
          "Read a session file; its tensors are a private memory map of it.")
      .def_static(
          "checksum", [](const at::Tensor& x) { return static_cast<int64_t>(checksum(x)); },
          "Return the checksum of a tensor's elements.")
      .def("check_model", of(&SessionFile::check_model),
           "Refuse a session of another model, and name what differs.", {arg("wanted")})
      .def("check_settings",
           [](const Self& self, const std::string& wanted) {
             self->held.check_settings(PrefillConfig::parse(wanted));
           },
           "Refuse a session of other settings.", {arg("wanted")})
      .def(
          "header",
          [](const Self& self) {
            const SessionFile& held = self->held;
            return std::make_tuple(held.model, held.settings, held.length);
          },
          "Return what tells the model from others, all fields of the settings, and the number of "
          "tokens.")
      .def(
          "tensors",
          [](const Self& self) {
            Tensors tensors;
            for (const auto& [name, tensor] : self->held.tensors) tensors.insert(name, tensor);
            return tensors;
          },
          "Return the tensors by name.");
}

void register_atomic_file(torch::Library& m) {
  m.class_<Holder<AtomicFile>>("AtomicFile")
      .def(torch::init<std::string>(),
           "A scratch file in the folder of a file, which takes its place at the end.",
           {arg("path")})
      .def("scratch", of(&AtomicFile::scratch), "Return the path of the scratch file.")
      .def("commit", of(&AtomicFile::commit), "Replace the file.")
      .def("discard", of(&AtomicFile::discard),
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
