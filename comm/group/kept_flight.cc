#include "evenkeel/comm/group/kept_flight.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"

namespace evenkeel::internal {
namespace {

// Returns `name` with characters that are safe in a file's name.
std::string Harmless(std::string name) {
  for (char& c : name) {
    const bool is_good = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
                         c == '_' || c == '-' || c == '+';
    if (!is_good) c = '_';
  }
  return name;
}

}  // namespace

KeptFlight::Moment KeptFlight::Now() const {
  Moment moment{.header = rank_, .entries = {}};
  FlightHeader& header = moment.header;
  for (const Waits::Seen& seen : waits_.Now().waits) header.waits.push_back(seen.wait.text);
  for (const ChannelRecord* channel : channels_.all()) {
    absl::MutexLock lock(&channel->mutex);
    header.channels.push_back(
        {.id = channel->id, .name = channel->name, .position = channel->position});
  }
  moment.entries = flight_.Entries();
  // Readers compare the records of several hosts, and those with logs: in the time of day.
  header.time = absl::Now();
  const absl::Duration ahead = header.time - SteadyNow();
  for (FlightEntry& entry : moment.entries) {
    entry.issued += ahead;
    entry.ended += ahead;
    entry.deadline += ahead;
  }
  return moment;
}

void KeptFlight::Keep() {
  {
    absl::MutexLock lock(&mutex_);
    if (kept_ != nullptr) return;
  }
  auto moment = std::make_shared<const Moment>(Now());
  absl::MutexLock lock(&mutex_);
  if (kept_ == nullptr) kept_ = std::move(moment);
}

void KeptFlight::Write(const absl::Status& status) {
  if (folder_.empty()) return;
  {
    absl::MutexLock lock(&mutex_);
    if (kept_ == nullptr || is_written_) return;
    is_written_ = true;
  }
  std::error_code ignored;  // A failed write reports the reason.
  std::filesystem::create_directories(folder_, ignored);
  if (absl::Status written = WriteFlight(Path(folder_), Json([&] { return status; }));
      !written.ok()) {
    Warn(nullptr, absl::StrCat("rank ", rank_.rank, ": ", written.message()));
  }
}

std::string KeptFlight::Json(absl::FunctionRef<absl::Status()> status) const {
  std::shared_ptr<const Moment> moment;
  {
    absl::MutexLock lock(&mutex_);
    moment = kept_;
  }
  if (moment == nullptr) moment = std::make_shared<const Moment>(Now());
  FlightHeader header = moment->header;
  header.status = status();
  return FlightJson(header, moment->entries);
}

std::string KeptFlight::Path(absl::string_view folder) const {
  return absl::StrCat(folder, "/", Harmless(rank_.group), ".rank", rank_.rank, ".json");
}

}  // namespace evenkeel::internal
