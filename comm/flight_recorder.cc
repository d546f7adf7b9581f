#include "evenkeel/comm/flight_recorder.h"

#include <algorithm>

#include "evenkeel/comm/base/clock.h"

namespace evenkeel {

FlightRecorder::FlightRecorder(size_t capacity) : capacity_(std::max<size_t>(capacity, 1)) {}

int64_t FlightRecorder::Begin(const FlightEntry& entry) {
  absl::MutexLock lock(&mutex_);
  const int64_t number = next_++;
  if (ring_.size() < capacity_) {
    ring_.push_back(entry);
    ring_.back().number = number;
    return number;
  }
  FlightEntry& place = ring_[number % capacity_];
  if (place.is_open()) older_.emplace(place.number, place);
  place = entry;
  place.number = number;
  return number;
}

void FlightRecorder::SetPeer(int64_t number, int peer, int64_t sequence) {
  absl::MutexLock lock(&mutex_);
  const auto older = older_.find(number);
  if (older == older_.end() && Find(number) == nullptr) return;
  FlightEntry& entry = older == older_.end() ? ring_[number % capacity_] : older->second;
  entry.what.root = peer;
  entry.sequence = sequence;
}

void FlightRecorder::End(int64_t number, const absl::Status& status) {
  const absl::Time now = SteadyNow();
  absl::MutexLock lock(&mutex_);
  if (older_.erase(number) > 0) return;
  const FlightEntry* found = Find(number);
  if (found == nullptr || !found->is_open()) return;
  FlightEntry& entry = ring_[number % capacity_];
  entry.ended = now;
  entry.code = status.code();
}

const FlightEntry* FlightRecorder::Find(int64_t number) const {
  if (number < 0 || number >= next_) return nullptr;
  const FlightEntry& place = ring_[number % capacity_];
  return place.number == number ? &place : nullptr;
}

std::optional<FlightEntry> FlightRecorder::Get(int64_t number) const {
  absl::ReaderMutexLock lock(&mutex_);
  if (const FlightEntry* entry = Find(number); entry != nullptr) return *entry;
  const auto older = older_.find(number);
  return older == older_.end() ? std::nullopt : std::optional<FlightEntry>(older->second);
}

template <typename Visit>
void FlightRecorder::ForEach(Visit visit) const {
  for (const auto& [number, entry] : older_) visit(entry);
  for (int64_t n = next_ - static_cast<int64_t>(ring_.size()); n < next_; ++n)
    visit(ring_[n % capacity_]);
}

template <typename Visit>
void FlightRecorder::ForEachBack(Visit visit) const {
  for (int64_t n = next_ - 1; n >= next_ - static_cast<int64_t>(ring_.size()); --n) {
    if (!visit(ring_[n % capacity_])) return;
  }
  for (auto older = older_.rbegin(); older != older_.rend(); ++older) {
    if (!visit(older->second)) return;
  }
}

std::vector<FlightEntry> FlightRecorder::Entries() const {
  absl::ReaderMutexLock lock(&mutex_);
  std::vector<FlightEntry> entries;
  entries.reserve(older_.size() + ring_.size());
  ForEach([&](const FlightEntry& entry) { entries.push_back(entry); });
  return entries;
}

std::vector<FlightEntry> FlightRecorder::OpenEntries() const {
  absl::ReaderMutexLock lock(&mutex_);
  std::vector<FlightEntry> entries;
  ForEach([&](const FlightEntry& entry) {
    if (entry.is_open()) entries.push_back(entry);
  });
  return entries;
}

std::vector<FlightEntry> FlightRecorder::Recent(uint64_t channel, size_t count) const {
  absl::ReaderMutexLock lock(&mutex_);
  std::vector<FlightEntry> entries;
  ForEachBack([&](const FlightEntry& entry) {
    if (entries.size() < count && entry.channel == channel && !IsPair(entry.what.kind)) {
      entries.push_back(entry);
    }
    return entries.size() < count;
  });
  std::reverse(entries.begin(), entries.end());
  return entries;
}

int64_t FlightRecorder::issued() const {
  absl::ReaderMutexLock lock(&mutex_);
  return next_;
}

}  // namespace evenkeel
