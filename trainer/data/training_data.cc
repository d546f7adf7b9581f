#include "evenkeel/trainer/data/training_data.h"

#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/tokenizer/learn_tokenizer.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

namespace evenkeel {
namespace {

absl::StatusOr<TrainingData> LoadImages(
    absl::FunctionRef<absl::StatusOr<ImageDataset>(Split split)> load) {
  EK_ASSIGN_OR_RETURN(ImageDataset train, load(Split::kTrain));
  EK_ASSIGN_OR_RETURN(ImageDataset test, load(Split::kTest));
  const ImageShape shape = train.shape();
  return TrainingData{
      .train = std::make_unique<ImageDataset>(std::move(train)),
      .test = std::make_unique<ImageDataset>(std::move(test)),
      .image = shape,
  };
}

// Returns the tokenizer that was given; null if none was.
absl::StatusOr<std::shared_ptr<const Tokenizer>> GivenTokenizer(const DataOptions& options) {
  if (options.tokenizer.empty()) return nullptr;
  EK_ASSIGN_OR_RETURN(Tokenizer tokenizer, ReadTokenizer(options.tokenizer));
  if (tokenizer.size() <= options.vocabulary.value_or(tokenizer.size()))
    return std::make_shared<const Tokenizer>(std::move(tokenizer));
  return absl::InvalidArgumentError(
      absl::StrCat("the tokenizer ", options.tokenizer, " has ", tokenizer.size(),
                   " tokens, but the vocabulary is ", *options.vocabulary));
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> TokenizerOf(const std::string& text,
                                                             const DataOptions& options) {
  EK_ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> given, GivenTokenizer(options));
  if (given != nullptr) return given;
  Tokenizer bytes = Tokenizer::OfBytes();
  const int64_t vocabulary = options.vocabulary.value_or(bytes.size());
  if (vocabulary == bytes.size()) return std::make_shared<const Tokenizer>(std::move(bytes));
  if (!options.may_make_tokenizer) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the model has ", vocabulary, " tokens and no tokenizer in its folder; pass --tokenizer"));
  }
  EK_ASSIGN_OR_RETURN(const std::vector<absl::string_view> runs,
                      TextDataset::RunsOf(text, {.context = options.context, .tokenizer = &bytes}));
  EK_ASSIGN_OR_RETURN(Tokenizer made, LearnTokenizer(runs, vocabulary));
  return std::make_shared<const Tokenizer>(std::move(made));
}

absl::StatusOr<TrainingData> LoadTextData(const DataOptions& options) {
  EK_ASSIGN_OR_RETURN(
      const std::shared_ptr<const std::string> text,
      LoadText(options.path, options.kind.has_value() ? Zeros::kTake : Zeros::kRefuse));
  TrainingData data;
  EK_ASSIGN_OR_RETURN(data.tokenizer, Annotate(TokenizerOf(*text, options), options.path));
  data.vocabulary = options.vocabulary.value_or(data.tokenizer->size());
  const auto split = [&](Split split) -> absl::StatusOr<std::unique_ptr<TextDataset>> {
    const bool is_of_bytes = data.tokenizer->is_of_bytes();
    absl::StatusOr<TextDataset> made =
        TextDataset::Make(text, {.context = options.context,
                                 .split = split,
                                 .tokenizer = is_of_bytes ? nullptr : data.tokenizer.get()});
    EK_RETURN_IF_ERROR(Annotate(made.status(), options.path));
    return std::make_unique<TextDataset>(*std::move(made));
  };
  EK_ASSIGN_OR_RETURN(data.train, split(Split::kTrain));
  EK_ASSIGN_OR_RETURN(data.test, split(Split::kTest));
  return data;
}

struct ShardPaths {
  std::string train;
  std::string test;
};

absl::StatusOr<ShardPaths> FindShards(const DataOptions& options) {
  std::error_code error;
  if (options.test_path.empty() && std::filesystem::is_directory(options.path, error)) {
    return ShardPaths{options.path + "/*train*.bin", options.path + "/*val*.bin"};
  }
  if (!options.test_path.empty()) return ShardPaths{options.path, options.test_path};
  const std::string train = "train";
  const size_t found = options.path.rfind(train);
  if (found == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.path,
                     ": no token shards to test with; pass them with --test_data, or name the "
                     "training shards with \"train\" in their path, so that the test shards are "
                     "found under the same path with \"val\""));
  }
  ShardPaths paths{options.path, options.path};
  paths.test.replace(found, train.size(), "val");
  return paths;
}

absl::StatusOr<TrainingData> LoadTokens(const DataOptions& options) {
  EK_ASSIGN_OR_RETURN(const ShardPaths paths, FindShards(options));
  EK_ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> tokenizer, GivenTokenizer(options));
  const int64_t usual = tokenizer == nullptr ? kGpt2Vocabulary : tokenizer->size();
  const TokenShardsOptions shards{.context = options.context,
                                  .vocabulary = options.vocabulary.value_or(usual)};
  EK_ASSIGN_OR_RETURN(TokenShards train, TokenShards::Open(paths.train, shards));
  EK_ASSIGN_OR_RETURN(TokenShards test, TokenShards::Open(paths.test, shards));
  return TrainingData{
      .train = std::make_unique<TokenShards>(std::move(train)),
      .test = std::make_unique<TokenShards>(std::move(test)),
      .vocabulary = shards.vocabulary,
      .tokenizer = std::move(tokenizer),
  };
}

absl::StatusOr<TrainingData> Load(const DataOptions& options, DataKind kind, Contents contents) {
  switch (kind) {
    case DataKind::kIdx:
      return LoadImages([&](Split split) { return LoadIdx(options.path, split, contents); });
    case DataKind::kCifar:
      return LoadImages([&](Split split) { return LoadCifar(options.path, split); });
    case DataKind::kText:
      return LoadTextData(options);
    case DataKind::kTokens:
      return LoadTokens(options);
  }
  return absl::InvalidArgumentError("unknown kind of data (internal error)");
}

}  // namespace

absl::StatusOr<DataKind> GuessDataKind(const std::string& path) {
  // For a missing default path, the reader of the data reports the package that installs it.
  if (path == kFashionMnistFolder || HasIdx(path)) return DataKind::kIdx;
  if (path == kJargonFile) return DataKind::kText;
  if (HasCifar(path)) return DataKind::kCifar;
  const absl::StatusOr<std::vector<std::string>> files = TextFiles(path);
  if (absl::IsNotFound(files.status())) {
    return absl::NotFoundError(
        absl::StrCat(files.status().message(), "; pass a folder with MNIST's ",
                     "train-images-idx3-ubyte or CIFAR-10's data_batch_1.bin, or a file, a ",
                     "folder or a pattern of token shards or of any text"));
  }
  EK_RETURN_IF_ERROR(files.status());
  for (const std::string& name : *files) {
    EK_ASSIGN_OR_RETURN(const MappedFile file, MapFile(name));
    if (BeginsAsTokenShard(*file)) return DataKind::kTokens;
    EK_RETURN_IF_ERROR(Annotate(CheckIsNoOtherShard(*file), name));
  }
  return DataKind::kText;
}

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const DataOptions& options,
                                                                     Contents contents) {
  const absl::StatusOr<DataKind> kind =
      options.kind.has_value() ? *options.kind : GuessDataKind(options.path);
  EK_RETURN_IF_ERROR(kind.status());
  EK_ASSIGN_OR_RETURN(TrainingData data, Load(options, *kind, contents));
  if (data.train->size() == 0 || data.test->size() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.path, " has no samples to ", data.train->size() == 0 ? "train on" : "test with"));
  }
  return std::make_shared<const TrainingData>(std::move(data));
}

}  // namespace evenkeel
