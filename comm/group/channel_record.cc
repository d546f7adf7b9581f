#include "evenkeel/comm/group/channel_record.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/control/positions.h"

namespace evenkeel::internal {

ChannelRecord::ChannelRecord(absl::string_view channel_name)
    : name(channel_name), id(StableHash(0, name)) {}

absl::StatusOr<ChannelRecord*> ChannelRecords::Open(absl::string_view name) {
  if (name.empty() || name == kStepsChannel || absl::StrContains(name, '\t') ||
      absl::StrContains(name, '\n')) {
    return absl::InvalidArgumentError(
        absl::StrCat("OpenChannel: \"", name, "\" cannot name a channel"));
  }
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ChannelRecord>& record = records_[std::string(name)];
  if (record == nullptr) record = std::make_unique<ChannelRecord>(name);
  return record.get();
}

std::vector<ChannelRecord*> ChannelRecords::all() const {
  absl::MutexLock lock(&mutex_);
  std::vector<ChannelRecord*> all;
  for (const auto& [name, record] : records_) all.push_back(record.get());
  return all;
}

std::string ChannelRecords::Positions(int64_t steps) const {
  internal::Positions positions;
  positions[kStepsChannel].position = steps;
  for (const ChannelRecord* record : all()) {
    absl::MutexLock lock(&record->mutex);
    if (!record->last_issued.has_value()) continue;  // Not all ranks may have opened it.
    positions[record->name] = {record->position, record->issued_hash,
                               ToString(*record->last_issued)};
  }
  return Serialize(positions);
}

}  // namespace evenkeel::internal
