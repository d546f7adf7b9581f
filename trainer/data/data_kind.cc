#include "evenkeel/trainer/data/data_kind.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/cifar_dataset.h"
#include "evenkeel/trainer/data/idx_dataset.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/data/token_shards.h"
#include "evenkeel/zero_optim/checkpoint/mapped_file.h"

namespace evenkeel {

absl::StatusOr<DataKind> GuessDataKind(const std::string& path) {
  // For a missing default path, the reader of the data reports the package that installs it.
  if (path == kFashionMnistFolder || IdxDataset::IsIn(path)) return DataKind::kIdx;
  if (path == kJargonFile) return DataKind::kText;
  if (CifarDataset::IsIn(path)) return DataKind::kCifar;
  const absl::StatusOr<std::vector<std::string>> files = TextFiles(path);
  if (absl::IsNotFound(files.status())) {
    return absl::NotFoundError(
        absl::StrCat(files.status().message(), "; pass a folder with MNIST's ",
                     "train-images-idx3-ubyte or CIFAR-10's data_batch_1.bin, or a file, a ",
                     "folder or a pattern of token shards or of any text"));
  }
  EK_RETURN_IF_ERROR(files.status());
  for (const std::string& name : *files) {
    EK_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(name));
    if (BeginsAsTokenShard(file.bytes())) return DataKind::kTokens;
    EK_RETURN_IF_ERROR(Annotate(CheckIsNoOtherShard(file.bytes()), name));
  }
  return DataKind::kText;
}

}  // namespace evenkeel
