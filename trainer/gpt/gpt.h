// GPT-2: a language model whose parameters have the names, shapes and meaning of Hugging Face's
// `gpt2`.
//
//   EK_ASSIGN_OR_RETURN(const GptOptions options, GptPreset("mini"));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Gpt> model, MakeGpt(options));
//   EK_ASSIGN_OR_RETURN(BatchResult result,
//                       model->Forward(TokenBatch{inputs, targets, context}, Mode::kTraining));
//   EK_RETURN_IF_ERROR(model->Backward([&](int index) { return ddp->GradientReady(index); }));
//   // [vocabulary]
//   EK_ASSIGN_OR_RETURN(const std::span<const float> scores, model->NextToken(prompt));
//
// Layer norm before each part, learned positions, GELU (tanh), the head shares wte. Parameters in
// forward order: wte.weight [vocabulary, width], wpe.weight [context, width], h.0.ln_1.weight,
// .bias, h.0.attn.c_attn.weight [width, 3 width] ([in, out]), ..., ln_f.weight, ln_f.bias. wte's
// gradient, which the head begins and the embedding ends, is announced last.
//
// Precision: parameters and gradients are float32 (float64 with GptCompute::kFloat64, for tests).
//            With kBFloat16 the matrix products take bfloat16 and add up in float32; everything
//            else stays in float32. Where oneDNN has no bfloat16 for the processor (x86 without
//            AVX-512), plain loops compute the same, slowly.
// Memory:    of training on n tokens, each layer keeps 64 n width bytes in float32 for Backward.
// Dropout:   PassOptions::noise seeds it; each place in the model draws its own. Evaluation has
//            none.
// Threads:   thread-compatible.
// Errors:    InvalidArgument for sizes that are not possible, with the value and what it may be;
//            ResourceExhausted if memory is not enough.
// Source:    Radford et al., "Language models are unsupervised multitask learners", 2019;
//            initialisation as there, section 2.3: normal, 0.02, of the projections back into the
//            residual stream divided by sqrt(2 layers).

#ifndef EVENKEEL_TRAINER_GPT_GPT_H_
#define EVENKEEL_TRAINER_GPT_GPT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/hf_files.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

class Gpt : public Model {
 public:
  virtual const GptOptions& options() const = 0;
  std::map<std::string, std::string> metadata() const override {
    return {{"heads", std::to_string(options().heads)}};
  }
  std::map<std::string, std::string> companions() const override { return HfFiles(options()); }
  // The scores of what follows `tokens`, of which the last `context` count. Valid until the next
  // call of this or of Forward; it is a Forward in evaluation mode itself. InvalidArgument without
  // tokens, or for one that is not in the vocabulary.
  virtual absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) = 0;

 protected:
  explicit Gpt(bool is_plan = false) : Model(is_plan) {}

  // Runs the last `context` of the tokens in evaluation mode, for NextToken(); returns the row of
  // the last one's scores.
  absl::StatusOr<int64_t> ScorePrompt(std::span<const int32_t> tokens);

 private:
  std::vector<int32_t> prompt_;
};

absl::StatusOr<std::unique_ptr<Gpt>> MakeGpt(const GptOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_H_
