#include "evenkeel/comm/agree.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

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

}  // namespace evenkeel
