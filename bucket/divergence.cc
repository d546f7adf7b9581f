#include "evenkeel/bucket/divergence.h"

#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

absl::Status Check(absl::Span<const NamedView> tensors, const DivergenceOptions& options) {
  if (options.parts < 1 || options.part < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("divergence: part ", options.part, " of ", options.parts, " parts can't be looked at"));
  }
  for (const NamedView& tensor : tensors) {
    if (tensor.view.device.is_cpu()) continue;
    return absl::UnimplementedError(
        absl::StrCat("divergence: \"", tensor.name, "\" is ", ToString(tensor.view), ", not in the CPU's memory"));
  }
  return absl::OkStatus();
}

// By rank: what it has that few have.
std::vector<int> RanksUnlikeMost(const std::vector<uint64_t>& by_rank) {
  std::map<uint64_t, int> count;
  for (const uint64_t hash : by_rank) ++count[hash];
  uint64_t usual = by_rank[0];
  for (const uint64_t hash : by_rank) {
    if (count[hash] > count[usual]) usual = hash;
  }
  std::vector<int> ranks;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] != usual) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace

std::string ToString(const Divergence& divergence) {
  std::string text = absl::StrCat("\"", divergence.tensor, "\" (tensor ", divergence.index, ") differs on ",
                                  RankList(divergence.ranks));
  if (divergence.tensors > 1) absl::StrAppend(&text, ", and ", divergence.tensors - 1, " more tensors differ");
  return text;
}

absl::StatusOr<std::optional<Divergence>> FindDivergence(absl::Span<const NamedView> tensors, Communicator& comm,
                                                         const DivergenceOptions& options) {
  EK_RETURN_IF_ERROR(Check(tensors, options));
  std::vector<int> looked_at;
  std::vector<uint64_t> own;
  uint64_t names = StableHash(tensors.size(), static_cast<uint64_t>(options.parts)), values = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    names = StableHash(names, absl::StrCat(tensors[i].name, " ", ToString(tensors[i].view)));
    if (static_cast<int64_t>(i) % options.parts != options.part % options.parts) continue;
    const auto* bytes = static_cast<const char*>(tensors[i].view.data);
    looked_at.push_back(static_cast<int>(i));
    own.push_back(StableHash(0, absl::string_view(bytes, tensors[i].view.bytes())));
    values = StableHash(values, own.back());
  }

  const std::string mine = internal::ByteWriter().U64(names).I64(options.part % options.parts).U64(values).Take();
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, comm.control().Exchange("divergence", mine, comm.timeout()));
  bool is_same = true;
  for (const std::string& part : parts) {
    is_same = is_same && part == parts[0];
    if (absl::string_view(part).substr(0, 16) != absl::string_view(parts[0]).substr(0, 16)) {
      return absl::InvalidArgumentError("divergence: the ranks look at different tensors");
    }
  }
  if (is_same) return std::nullopt;

  internal::ByteWriter writer;
  for (const uint64_t hash : own) writer.U64(hash);
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts hashes,
                      comm.control().Exchange("divergence", writer.Take(), comm.timeout()));
  std::vector<internal::ByteReader> readers(hashes.begin(), hashes.end());
  std::optional<Divergence> found;
  for (const int index : looked_at) {
    std::vector<uint64_t> by_rank;
    for (internal::ByteReader& reader : readers) by_rank.push_back(reader.U64());
    std::vector<int> ranks = RanksUnlikeMost(by_rank);
    if (ranks.empty()) continue;
    if (found.has_value()) {
      ++found->tensors;
    } else {
      found = {.tensor = std::string(tensors[index].name), .index = index, .ranks = std::move(ranks)};
    }
  }
  for (const internal::ByteReader& reader : readers) EK_RETURN_IF_ERROR(reader.Finish("a rank's hashes"));
  return found;
}

absl::StatusOr<std::optional<Divergence>> FindDivergence(const ParameterSet& params, Communicator& comm,
                                                         const DivergenceOptions& options) {
  std::vector<NamedView> tensors;
  for (int i = 0; i < params.size(); ++i) tensors.push_back({params[i].name, params[i].value});
  return FindDivergence(tensors, comm, options);
}

}  // namespace evenkeel
