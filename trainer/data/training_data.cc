#include "evenkeel/trainer/data/training_data.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/cifar_dataset.h"
#include "evenkeel/trainer/data/text_dataset.h"

namespace evenkeel {
namespace {

template <typename Images>
absl::StatusOr<TrainingData> LoadImages(const DataOptions& options, const ImageShape& shape) {
  EK_ASSIGN_OR_RETURN(Images train, Images::Load(options.path, Split::kTrain));
  EK_ASSIGN_OR_RETURN(Images test, Images::Load(options.path, Split::kTest));
  return TrainingData{
      .train = std::make_unique<Images>(std::move(train)),
      .test = std::make_unique<Images>(std::move(test)),
      .image = shape,
  };
}

absl::StatusOr<TrainingData> LoadTextData(const DataOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::shared_ptr<const std::string> text, LoadText(options.path));
  const auto split = [&](Split split) -> absl::StatusOr<std::unique_ptr<TextDataset>> {
    absl::StatusOr<TextDataset> data =
        TextDataset::Make(text, {.context = options.context, .split = split});
    EK_RETURN_IF_ERROR(Annotate(data.status(), options.path));
    return std::make_unique<TextDataset>(*std::move(data));
  };
  TrainingData data{.vocabulary = TextDataset::kVocabulary};
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
  const TokenShardsOptions shards{.context = options.context, .vocabulary = options.vocabulary};
  EK_ASSIGN_OR_RETURN(TokenShards train, TokenShards::Open(paths.train, shards));
  EK_ASSIGN_OR_RETURN(TokenShards test, TokenShards::Open(paths.test, shards));
  return TrainingData{
      .train = std::make_unique<TokenShards>(std::move(train)),
      .test = std::make_unique<TokenShards>(std::move(test)),
      .vocabulary = options.vocabulary,
  };
}

absl::StatusOr<TrainingData> Load(const DataOptions& options, DataKind kind) {
  switch (kind) {
    case DataKind::kIdx:
      return LoadImages<IdxDataset>(options, ImageShape{.channels = 1, .side = kImageSide});
    case DataKind::kCifar:
      return LoadImages<CifarDataset>(options, CifarDataset::kShape);
    case DataKind::kText:
      return LoadTextData(options);
    case DataKind::kTokens:
      return LoadTokens(options);
  }
  return absl::InvalidArgumentError("unknown kind of data (internal error)");
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TrainingData>> LoadTrainingData(const DataOptions& options) {
  const absl::StatusOr<DataKind> kind =
      options.kind.has_value() ? *options.kind : GuessDataKind(options.path);
  EK_RETURN_IF_ERROR(kind.status());
  EK_ASSIGN_OR_RETURN(TrainingData data, Load(options, *kind));
  if (data.train->size() == 0 || data.test->size() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.path, " has no samples to ", data.train->size() == 0 ? "train on" : "test with"));
  }
  return std::make_shared<const TrainingData>(std::move(data));
}

}  // namespace evenkeel
