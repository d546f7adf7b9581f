// Lets a language model write: see --help.

#include <gflags/gflags.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/compute_threads.h"
#include "evenkeel/trainer/flag_help.h"
#include "evenkeel/trainer/gpt/find_weights.h"
#include "evenkeel/trainer/gpt/generate_tokens.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/gpt/gpt_options.h"

DEFINE_string(weights, "", "=PATH safetensors file, or a folder with model.safetensors or checkpoints, step-N");
DEFINE_int64(heads, 0, "attention heads (default: what the file says, else a head for each 64 of width)");

DEFINE_string(prompt, "",
              "what to go on from: text, or numbers of tokens, 17,4,... (default: the beginning of a text)");
DEFINE_int64(tokens, 500, "how many to write");
DEFINE_double(temperature, 1, "lower is surer, 0 always takes the best");
DEFINE_int64(top_k, 0, "choose among so many best tokens; 0 is all");
DEFINE_uint64(seed, 0, "of the choices: equal seeds write the same");

namespace evenkeel {
namespace {

const FlagGroup kFlagGroups[] = {
    {"Model", {"weights", "heads"}},
    {"Text", {"prompt", "tokens", "temperature", "top_k", "seed"}},
};

constexpr char kSummary[] = R"(Lets a language model go on from a prompt, token by token, on the CPU.

  bazel run //trainer:generate -- --weights=model.safetensors --prompt="Once upon"
  bazel run //trainer:generate -- --weights=checkpoints --temperature=0.8 --top_k=40 --seed=7

Takes what train saves, and files of GPT-2s from elsewhere. Of a model of bytes (a vocabulary of 256) the prompt is text,
and so is what it writes, byte by byte to stdout, the prompt first. Of others both are numbers of tokens.

)";

constexpr int64_t kBytes = 256;  // The vocabulary of a model of bytes.

bool IsSet(const char* flag) {
  std::string value;
  return gflags::GetCommandLineOption(flag, &value) && value == "true";
}

// Help, for whatever spelling of it gflags knows.
bool WantsHelp() {
  for (const char* name : {"help", "helpfull", "helpshort", "helppackage", "helpxml"}) {
    if (IsSet(name)) return true;
  }
  return false;
}

int Fail(absl::string_view sentence) {
  std::cerr << absl::StrCat("generate: ", sentence, "\n");
  return EXIT_FAILURE;
}

absl::StatusOr<std::vector<int32_t>> PromptTokens(const std::string& prompt, int64_t vocabulary) {
  std::vector<int32_t> tokens;
  if (vocabulary == kBytes) {
    for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  for (absl::string_view number : absl::StrSplit(prompt, ',', absl::SkipEmpty())) {
    int32_t token;
    if (!absl::SimpleAtoi(number, &token) || token < 0 || token >= vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat("--prompt: this model has ", vocabulary,
                                                     " tokens and takes their numbers, like 17,4; \"", number,
                                                     "\" is none of them"));
    }
    tokens.push_back(token);
  }
  return tokens;
}

// What comes before a text: after which byte a line begins, or the last token, GPT-2's <|endoftext|>.
int32_t BeginOfText(int64_t vocabulary) { return vocabulary == kBytes ? '\n' : static_cast<int32_t>(vocabulary - 1); }

// At once, so that one can watch. Numbers get a line each.
absl::Status Print(int32_t token, int64_t vocabulary) {
  const bool is_written =
      vocabulary == kBytes ? std::fputc(token, stdout) != EOF : std::fprintf(stdout, "%d\n", token) >= 0;
  if (is_written && std::fflush(stdout) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "cannot write to stdout");
}

absl::StatusOr<std::unique_ptr<Gpt>> ReadModel() {
  if (FLAGS_weights.empty()) {
    return absl::InvalidArgumentError(
        "--weights is missing: a safetensors file, or a folder of checkpoints; see --help");
  }
  EK_ASSIGN_OR_RETURN(const std::string path, FindWeights(FLAGS_weights));
  EK_ASSIGN_OR_RETURN(const GptFile file, GptFile::Read(path));
  GptOptions options = file.options();
  if (!gflags::GetCommandLineFlagInfoOrDie("heads").is_default) options.heads = FLAGS_heads;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Gpt> model, MakeGpt(options));
  EK_RETURN_IF_ERROR(file.LoadInto(*model));
  return model;
}

absl::Status Write() {
  const GenerateOptions options{
      .count = FLAGS_tokens, .sample = {.temperature = FLAGS_temperature, .top_k = FLAGS_top_k}, .seed = FLAGS_seed};
  EK_RETURN_IF_ERROR(Validate(options));  // Before a large file is read.
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Gpt> model, ReadModel());
  const int64_t vocabulary = model->options().vocabulary;
  EK_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, PromptTokens(FLAGS_prompt, vocabulary));
  for (int32_t token : prompt) EK_RETURN_IF_ERROR(Print(token, vocabulary));
  if (prompt.empty()) prompt.push_back(BeginOfText(vocabulary));
  return GenerateTokens(*model, prompt, options, [&](int32_t token) { return Print(token, vocabulary); });
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  // Under `bazel run` this is where the user is.
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY"); folder != nullptr && chdir(folder) != 0) {
    return evenkeel::Fail(absl::ErrnoToStatus(errno, absl::StrCat("cannot go to ", folder)).message());
  }
  gflags::ParseCommandLineNonHelpFlags(&argc, &argv, /*remove_flags=*/true);
  if (evenkeel::WantsHelp()) {
    std::cout << evenkeel::kSummary << evenkeel::FlagHelp(evenkeel::kFlagGroups);
    return EXIT_SUCCESS;
  }
  if (evenkeel::IsSet("version")) return evenkeel::Fail("--version is no flag; see --help");
  if (argc > 1) return evenkeel::Fail(absl::StrCat("\"", argv[1], "\" is no flag; see --help"));
  // Products of one token are too small to be shared out.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) evenkeel::SetComputeThreads(1);
  const absl::Status status = evenkeel::Write();
  return status.ok() ? EXIT_SUCCESS : evenkeel::Fail(status.message());
}
