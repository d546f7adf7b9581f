#include "evenkeel/bucket/state_sync.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int64_t kGroupBytes = int64_t{250} << 20;

// One line per parameter: what must be equal on all ranks, as a person reads it.
std::string Describe(const ParameterSet& params) {
  std::string text;
  for (int i = 0; i < params.size(); ++i) {
    absl::StrAppend(&text, "\"", params[i].name, "\" ", ToString(params[i].value), "\n");
  }
  return text;
}

absl::Status FirstDifference(const std::vector<std::string>& descriptions) {
  const std::vector<absl::string_view> first = absl::StrSplit(descriptions[0], '\n');
  for (size_t rank = 1; rank < descriptions.size(); ++rank) {
    const std::vector<absl::string_view> other = absl::StrSplit(descriptions[rank], '\n');
    if (first.size() != other.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank 0 has ", first.size() - 1, " parameters, rank ", rank, " has ", other.size() - 1));
    }
    for (size_t i = 0; i < first.size(); ++i) {
      if (first[i] == other[i]) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", i, " is ", first[i], " on rank 0 and ", other[i], " on rank ", rank));
    }
  }
  return absl::InternalError("parameters differ in a way that their description does not show");
}

}  // namespace

std::vector<std::vector<TensorView>> GroupForBroadcast(absl::Span<const TensorView> tensors) {
  struct Open {
    DType dtype;
    size_t group;
    int64_t bytes;
  };
  std::vector<std::vector<TensorView>> groups;
  std::vector<Open> open;
  for (const TensorView& tensor : tensors) {
    Open* found = nullptr;
    for (Open& candidate : open) {
      if (candidate.dtype == tensor.dtype) found = &candidate;
    }
    if (found == nullptr) {
      found = &open.emplace_back(Open{tensor.dtype, groups.size(), 0});
      groups.emplace_back();
    } else if (found->bytes + tensor.bytes() > kGroupBytes) {
      *found = {tensor.dtype, groups.size(), 0};
      groups.emplace_back();
    }
    groups[found->group].push_back(tensor);
    found->bytes += tensor.bytes();
  }
  return groups;
}

absl::Status BroadcastState(Channel& channel, absl::Span<const TensorView> tensors, int root, Role role) {
  const std::vector<std::vector<TensorView>> groups = GroupForBroadcast(tensors);
  std::vector<Work> works;
  for (size_t g = 0; g < groups.size(); ++g) {
    works.push_back(channel.Broadcast(
        groups[g], root, {.role = role, .index = static_cast<int>(g), .index_count = static_cast<int>(groups.size())}));
  }
  absl::Status status;
  for (const Work& work : works) status.Update(work.Wait());
  return status;
}

absl::Status AgreeThatAllCan(absl::string_view topic, const absl::Status& own, ControlChannel& control,
                             absl::Duration timeout) {
  const std::string mine = internal::ByteWriter().I32(static_cast<int>(own.code())).Bytes(own.message()).Take();
  absl::StatusOr<ControlChannel::Parts> parts = control.Exchange(topic, mine, timeout);
  if (!parts.ok()) return own.ok() ? parts.status() : own;
  for (size_t rank = 0; rank < parts->size(); ++rank) {
    internal::ByteReader reader((*parts)[rank]);
    const auto code = static_cast<absl::StatusCode>(reader.I32());
    const absl::string_view message = reader.Bytes();
    EK_RETURN_IF_ERROR(reader.Finish(absl::StrCat(topic, " of rank ", rank)));
    EK_RETURN_IF_ERROR(Annotate(absl::Status(code, message), absl::StrCat("rank ", rank)));
  }
  return absl::OkStatus();
}

absl::Status VerifySameParameters(const ParameterSet& params, ControlChannel& control, absl::Duration timeout) {
  const std::string mine = Describe(params);
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts hashes,
                      control.Exchange("parameters", absl::StrCat(StableHash(params.size(), mine)), timeout));
  bool same = true;
  for (const std::string& hash : hashes) same = same && hash == hashes[0];
  if (same) return absl::OkStatus();
  // Every rank saw the same hashes, so all come here.
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts all, control.Exchange("parameters", mine, timeout));
  return FirstDifference(all);
}

uint64_t HashOfBytes(absl::Span<const TensorView> tensors) {
  uint64_t hash = 0;
  for (const TensorView& tensor : tensors) {
    hash = StableHash(hash, absl::string_view(static_cast<const char*>(tensor.data), tensor.bytes()));
  }
  return hash;
}

}  // namespace evenkeel
