// Packages, their sessions and samplers as torch.classes.h2o_prefill.*, for Python.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>

#include "common/holder.h"
#include "h2o_prefill/package_session.h"
#include "h2o_prefill/sampler.h"

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
      : Holder(of->object, token_ids, options, by->object), session(of), sampler(by) {}
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
      .def(
          "metadata", [](const Self& self) { return self->object.package().metadata(); },
          "Return the metadata of the package.")
      .def("checkpoint_before", of(&PackageSession::checkpoint_before),
           "Return the last length, up to this one, to which truncate is exact.", {arg("length")})
      .def("truncate", of(&PackageSession::truncate), "Remove the tokens after the first `length`.",
           {arg("length")})
      .def("forward",
           [](const Self& self, const at::Tensor& token_ids, const at::Tensor& rows) {
             return self->object.forward(token_ids, rows);
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

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  register_sampler(m);
  register_package_session(m);
}

}  // namespace
}  // namespace h2o_prefill
