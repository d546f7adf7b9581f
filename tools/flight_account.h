// Merges the flight records of a job's ranks: each rank's position, missing ranks, where the ranks
// first differ.
//
//   std::vector<FlightDump> dumps;  // one per file: ReadFlightDump(text)
//   for (const GroupAccount& account : AccountFor(std::move(dumps))) std::cout << ToText(account);
//
// A rank keeps its last operations only, so ranks are compared where their records overlap.
// Collectives are compared by their place in a channel; a send or a recv has a place among those of
// its pair of ranks, so it is shown but not compared.
//
// Threads: pure functions.
// Errors:  InvalidArgument for what is no flight record (comm/flight_dump.h says the form), with
//          the field and its value.

#ifndef EVENKEEL_TOOLS_FLIGHT_ACCOUNT_H_
#define EVENKEEL_TOOLS_FLIGHT_ACCOUNT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

// One file.
struct FlightDump {
  enum class State { kOpen, kDone, kFailed };
  struct Channel {
    std::string id, name;
    int64_t position = 0;  // Collectives that the rank has issued on it.
  };
  struct Entry {
    int64_t number = 0;
    std::string channel;  // Its id.
    int64_t sequence = 0;
    std::string kind, text, hash, code;
    int64_t issued_us = 0;
    std::optional<int64_t> ended_us;
    State state = State::kOpen;

    bool is_message() const { return kind == "send" || kind == "recv"; }
  };
  std::string file;  // For people.
  std::string group, backend;
  int rank = 0;
  int world_size = 1;
  absl::Time time;
  std::string code, message;  // The group's status.
  std::vector<std::string> waits;
  std::vector<Channel> channels;
  std::vector<Entry> entries;  // Oldest first.
};

absl::StatusOr<FlightDump> ReadFlightDump(absl::string_view text);

// Ranks that have the same at one place of a channel.
struct FlightSide {
  std::vector<int> ranks;
  std::string text;   // The collective; empty: they have not come there.
  std::string state;  // "open for 12.3 s", "done", "failed: UNAVAILABLE"; the first rank's.
  double issued_after =
      0;  // Seconds after the first rank that issued anything there; the last one's.
};

struct ChannelAccount {
  struct Place {
    int64_t position = 0;
    std::optional<FlightDump::Entry> last_finished;
    std::vector<FlightDump::Entry> open;
  };
  std::string id, name;
  std::map<int, Place> places;  // By rank.
  // The first place where ranks have different collectives, or some have none yet; -1: there is
  // none in the records.
  int64_t differs_at = -1;
  bool is_contradiction = false;  // Different collectives, not only late ranks.
  std::vector<FlightSide> sides;  // There; by their first rank, who has not come last.
};

struct GroupAccount {
  std::string group, backend;
  int world_size = 1;
  std::map<int, FlightDump> dumps;  // By rank.
  std::vector<int> missing;         // Ranks without a record.
  std::vector<std::string> notes;   // Oddities of the files.
  std::vector<ChannelAccount> channels;
};

// By group, in the order of their names.
std::vector<GroupAccount> AccountFor(std::vector<FlightDump> dumps);

std::string ToText(const GroupAccount& account);

struct RefusedFile {
  std::string file, why;
};
// {"version": 1, "groups": [...], "refused": [...]}: everything that ToText() writes, as data.
std::string ToJson(const std::vector<GroupAccount>& accounts,
                   const std::vector<RefusedFile>& refused);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_FLIGHT_ACCOUNT_H_
