#include "evenkeel/comm/agree.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

std::string Serialize(absl::Span<const Fact> facts) {
  internal::ByteWriter writer;
  for (const Fact& fact : facts) writer.Bytes(fact.what).Bytes(fact.value);
  return writer.Take();
}

// `all`: by rank, what Serialize() has written; they differ.
absl::Status FirstDifference(absl::Span<const std::string> all) {
  std::vector<internal::ByteReader> readers(all.begin(), all.end());
  while (true) {
    std::string what;  // The name of the next fact.
    bool differ = false;
    internal::Parties parties;
    for (size_t i = 0; i < all.size(); ++i) {
      const absl::string_view mine = readers[i].Bytes(), value = readers[i].Bytes();
      const int rank = static_cast<int>(i);
      if (what.empty()) what = std::string(mine);
      parties[rank] = !readers[i].ok() ? "nothing"
                      : mine == what   ? std::string(value)
                                       : absl::StrCat(mine, ": ", value);
      differ = differ || parties[rank] != parties[0];
    }
    if (what.empty())
      return absl::InternalError("the ranks' hashes differ, but no fact does (internal error)");
    if (!differ) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": ", internal::Describe(parties, "has", "have"), ": the ranks disagree"));
  }
}

}  // namespace

absl::StatusOr<std::vector<std::string>> AgreeOn(Communicator& comm, absl::string_view topic,
                                                 const absl::Status& own, absl::string_view value) {
  std::string mine = internal::ByteWriter().Status(own).Bytes(own.ok() ? value : "").Take();
  const absl::StatusOr<ControlChannel::Parts> parts =
      comm.control().Exchange(topic, std::move(mine), comm.timeout());
  if (!parts.ok()) return own.ok() ? parts.status() : own;
  const bool is_everywhere = std::all_of(
      parts->begin(), parts->end(), [&](const std::string& part) { return part == (*parts)[0]; });
  std::vector<std::string> values;
  for (size_t rank = 0; rank < parts->size(); ++rank) {
    internal::ByteReader reader((*parts)[rank]);
    const absl::Status status = reader.Status();
    values.emplace_back(reader.Bytes());
    EK_RETURN_IF_ERROR(reader.Finish(absl::StrCat(topic, " of rank ", rank)));
    if (status.ok()) continue;
    return is_everywhere ? status : Annotate(status, absl::StrCat("rank ", comm.members()[rank]));
  }
  return values;
}

absl::StatusOr<std::vector<std::string>> AgreeOnEqual(Communicator& comm, absl::string_view topic,
                                                      const absl::Status& own,
                                                      absl::string_view value) {
  const std::string hash = internal::ByteWriter().U64(StableHash(value.size(), value)).Take();
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> hashes, AgreeOn(comm, topic, own, hash));
  const bool is_same = std::all_of(hashes.begin(), hashes.end(),
                                   [&](const std::string& each) { return each == hashes[0]; });
  if (is_same) return std::vector<std::string>();
  return comm.control().Exchange(absl::StrCat(topic, "/values"), std::string(value),
                                 comm.timeout());
}

absl::Status VerifySame(Communicator& comm, absl::string_view topic, const absl::Status& own,
                        absl::Span<const Fact> facts) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      AgreeOnEqual(comm, topic, own, Serialize(facts)));
  return all.empty() ? absl::OkStatus() : FirstDifference(all);
}

}  // namespace evenkeel
