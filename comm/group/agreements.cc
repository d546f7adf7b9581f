#include "evenkeel/comm/group/agreements.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/control/positions.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The number of a channel's collectives in which the first difference is searched.
constexpr size_t kLookBack = 64;

using Parts = ControlChannel::Parts;

// The compared fields of one collective.
struct Part {
  uint64_t hash = 0;
  uint64_t scale = 0;  // The bits of the double.
  int64_t sequence = 0;
  std::string text;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.hash, self.scale, self.sequence, self.text);
  }
};

absl::Status CompareCollectives(const std::string& channel, const Parts& parts) {
  std::vector<Part> all;
  for (const std::string& bytes : parts) {
    EK_ASSIGN_OR_RETURN(Part part, FromBytes<Part>(bytes, "a collective to compare"));
    all.push_back(std::move(part));
  }
  bool hashes_differ = false, differ = false, texts_differ = false;
  for (const Part& part : all) {
    hashes_differ = hashes_differ || part.hash != all[0].hash;
    texts_differ = texts_differ || part.text != all[0].text || part.sequence != all[0].sequence;
    differ =
        differ || hashes_differ || part.scale != all[0].scale || part.sequence != all[0].sequence;
  }
  if (!differ) return absl::OkStatus();
  Parties parties;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Part& part = all[rank];
    std::string& text = parties[static_cast<int>(rank)];
    text = absl::StrCat("#", part.sequence, " ", part.text);
    if (!texts_differ && hashes_differ)
      absl::StrAppend(&text, " (hash ", absl::Hex(part.hash), ")");
    if (!texts_differ && !hashes_differ) {
      double scale = 0;
      std::memcpy(&scale, &part.scale, sizeof(scale));
      absl::StrAppend(&text, ", scale ", scale);
    }
    absl::StrAppend(&text, " on channel \"", channel, "\"");
  }
  return Disagreement(parties);
}

// A rank's place on one channel: position and rolling hash.
struct Place {
  int64_t position = 0;
  uint64_t hash = 0;

  static void VisitFields(auto& self, auto& visit) { visit(self.position, self.hash); }
};

bool AreEqual(const Parts& parts) {
  for (const std::string& part : parts) {
    if (part != parts[0]) return false;
  }
  return true;
}

// Returns the error of ranks that have issued different collectives on a channel; `details` has
// their last collectives.
absl::Status FirstDifference(const std::string& channel, const Parts& places,
                             const Parts& details) {
  std::vector<RankFacts> facts;
  for (const std::string& bytes : details) {
    EK_ASSIGN_OR_RETURN(RankStatus report, RankStatus::Parse(bytes));
    facts.push_back({.has_report = true, .report = std::move(report)});
  }
  Judgement judgement = Judge(facts, {});
  if (!judgement.status.ok()) return judgement.status;
  Parties parties;
  for (size_t rank = 0; rank < places.size(); ++rank) {
    EK_ASSIGN_OR_RETURN(const Place place, FromBytes<Place>(places[rank], "a place on a channel"));
    parties[static_cast<int>(rank)] =
        absl::StrCat(place.position, " (hash ", absl::Hex(place.hash), ")");
  }
  return Disagreement(
      parties, {.one = "has",
                .several = "have",
                .before = absl::StrCat("collectives issued on channel \"", channel, "\": ")});
}

// Ends a work when two operations have ended, with the first error of the two.
class EndsWithBoth {
 public:
  explicit EndsWithBoth(std::shared_ptr<WorkState> whole) : whole_(std::move(whole)) {}

  void End(const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      status_.Update(status);
      if (--open_ > 0) return;
    }
    whole_->Finish(status_);
  }

 private:
  const std::shared_ptr<WorkState> whole_;
  absl::Mutex mutex_;
  int open_ ABSL_GUARDED_BY(mutex_) = 2;
  absl::Status status_;  // Constant once both have ended.
};

}  // namespace

struct Agreements::Agreement {
  std::function<void()> on_deadline;
  std::function<Wait()> describe;
  std::shared_ptr<WorkState> work;
  Parts parts;  // Once `work` has ended well.
};

std::shared_ptr<Agreements::Agreement> Agreements::Begin(absl::string_view topic,
                                                         std::string payload,
                                                         absl::Duration timeout, std::string text,
                                                         Judge judge) {
  auto agreement = std::make_shared<Agreement>();
  absl::MutexLock lock(&mutex_);
  const Wait wait{.kind = Wait::Kind::kExchange,
                  .sequence = counts_[std::string(topic)]++,
                  .topic = std::string(topic),
                  .text = std::move(text)};
  agreement->on_deadline = [this, wait, timeout] { end_.OnDeadline(wait, timeout); };
  agreement->describe = [wait] { return wait; };
  agreement->work = std::make_shared<WorkState>(SteadyNow() + timeout, agreement->on_deadline,
                                                control_.waits(), agreement->describe);
  control_.Exchange(topic, std::move(payload),
                    [this, agreement, judge = std::move(judge)](absl::StatusOr<Parts> parts) {
                      if (!parts.ok()) return agreement->work->Finish(parts.status());
                      agreement->parts = *std::move(parts);
                      const absl::Status verdict =
                          judge == nullptr ? absl::OkStatus() : judge(agreement->parts);
                      // First, so that a woken thread finds nothing in flight.
                      if (!verdict.ok()) end_.FailWithAll(verdict);
                      agreement->work->Finish(verdict);
                    });
  return agreement;
}

absl::StatusOr<Agreements::Parts> Agreements::Agree(absl::string_view topic, std::string payload,
                                                    absl::Duration timeout, std::string text,
                                                    Judge judge) {
  EK_RETURN_IF_ERROR(end_.status());
  const std::shared_ptr<Agreement> agreement =
      Begin(topic, std::move(payload), timeout, std::move(text), std::move(judge));
  EK_RETURN_IF_ERROR(agreement->work->Wait());
  return std::move(agreement->parts);
}

// No thread waits for it: a group whose ranks differ ends during its creation or first use.
void Agreements::CompareLevels() {
  if (control_.world_size() == 1) return;
  const LibrarysTurn turn;  // The thread that makes a group need not use it.
  (void)Begin("verify level at creation", std::string(ToString(level())), timeout_,
              "the creation of the group", [](const Parts& parts) -> absl::Status {
                if (AreEqual(parts)) return absl::OkStatus();
                Parties parties;
                for (size_t rank = 0; rank < parts.size(); ++rank) {
                  parties[static_cast<int>(rank)] = absl::StrCat("\"", parts[rank], "\"");
                }
                return Disagreement(parties, {.one = "has",
                                              .several = "have",
                                              .before = "the level of verification: ",
                                              .after = " (EVENKEEL_VERIFY, or the option verify)"});
              });
}

absl::Status Agreements::SetLevel(VerifyLevel level, const std::string& mine) {
  const absl::StatusOr<Parts> parts =
      Agree("verify level", absl::StrCat(ToString(level), "\n", mine), timeout_,
            absl::StrCat("SetVerifyLevel(", ToString(level), ")"),
            [](const Parts& parts) -> absl::Status {
              Parties levels;
              std::vector<std::string> words, positions;
              for (size_t rank = 0; rank < parts.size(); ++rank) {
                const size_t newline = parts[rank].find('\n');
                if (newline == std::string::npos)
                  return absl::InternalError("a level of verification is malformed");
                words.push_back(parts[rank].substr(0, newline));
                positions.push_back(parts[rank].substr(newline + 1));
                levels[static_cast<int>(rank)] = words.back();
              }
              if (!AreEqual(words)) {
                return Disagreement(
                    levels, {.one = "sets", .several = "set", .before = "SetVerifyLevel: "});
              }
              return ComparePositions("SetVerifyLevel", positions);
            });
  if (!parts.ok()) return parts.status();
  level_ = level;
  return absl::OkStatus();
}

std::shared_ptr<WorkState> Agreements::CompareBeside(const std::string& channel,
                                                     const Collective& what,
                                                     const Operation& operation,
                                                     std::shared_ptr<WorkState> whole) {
  auto both = std::make_shared<EndsWithBoth>(std::move(whole));
  Part part{.hash = HashOf(what), .sequence = operation.sequence, .text = ToString(what)};
  std::memcpy(&part.scale, &operation.scale, sizeof(part.scale));
  const std::shared_ptr<Agreement> comparison =
      Begin(absl::StrCat("verify/", channel), ToBytes(part), operation.deadline - SteadyNow(),
            absl::StrCat("the comparison of #", part.sequence, " ", part.text),
            [channel](const Parts& parts) { return CompareCollectives(channel, parts); });
  comparison->work->OnDone([both](const absl::Status& status) { both->End(status); });
  auto data = std::make_shared<WorkState>(operation.deadline, nullptr);
  data->OnDone([this, both](const absl::Status& status) {
    if (!status.ok())
      end_.OnBackendFailure(status);  // The comparison may wait for ranks that never arrive.
    both->End(status);
  });
  return data;
}

Work Agreements::CompareIssued(const ChannelRecord& channel) {
  if (control_.world_size() == 1 || backend_.checks_pairs() || level() != VerifyLevel::kPositions)
    return Work();
  if (absl::Status ended = end_.status(); !ended.ok()) return Work(std::move(ended));
  Place place;
  {
    absl::MutexLock lock(&channel.mutex);
    place = {channel.position, channel.issued_hash};
  }
  const std::string text =
      absl::StrCat("the comparison of what was issued on channel \"", channel.name, "\"");
  const std::shared_ptr<Agreement> places =
      Begin(absl::StrCat("issued/", channel.name), ToBytes(place), timeout_, text);
  auto whole = std::make_shared<WorkState>(places->work->deadline(), places->on_deadline,
                                           control_.waits(), places->describe);
  places->work->OnDone([this, &channel, places, whole, text](const absl::Status& status) {
    if (!status.ok() || AreEqual(places->parts)) return whole->Finish(status);
    // They differ. A second exchange, which all ranks now join, finds the first difference.
    RankStatus mine;
    mine.channels.push_back({.id = channel.id, .name = channel.name});
    for (const FlightEntry& entry : flight_.Recent(channel.id, kLookBack)) {
      mine.channels[0].recent.push_back(
          {.sequence = entry.sequence, .hash = HashOf(entry.what), .text = ToString(entry.what)});
    }
    const std::shared_ptr<Agreement> details =
        Begin(absl::StrCat("issued differently/", channel.name), mine.Serialize(), timeout_, text,
              [places, name = channel.name](const Parts& parts) {
                return FirstDifference(name, places->parts, parts);
              });
    details->work->OnDone([whole](const absl::Status& status) { whole->Finish(status); });
  });
  return Work(std::move(whole));
}

}  // namespace evenkeel::internal
