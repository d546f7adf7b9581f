#include "evenkeel/comm/control/announced_messages.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

// One event at the receiver.
struct Event {
  enum Kind { kAnnounce, kNamed, kAny } kind;
  int rank;           // Of kAny: the expected sender, -1 for none.
  int64_t sends = 0;  // Of kAnnounce.
};
using enum Event::Kind;

struct Case {
  std::string name;
  std::vector<Event> events;
};

TEST(AnnouncedMessagesTest, EachMessageIsTakenOnce) {
  const std::vector<Case> cases = {
      {"nothing is announced", {{kAny, -1}}},
      {"in the order of the announcements",
       {{kAnnounce, 2, 1},
        {kAnnounce, 1, 1},
        {kAnnounce, 2, 2},
        {kAny, 2},
        {kAny, 1},
        {kAny, 2},
        {kAny, -1}}},
      {"several by one announcement", {{kAnnounce, 3, 2}, {kAny, 3}, {kAny, 3}, {kAny, -1}}},
      {"an announcement counts once",
       {{kAnnounce, 1, 2}, {kAnnounce, 1, 2}, {kAnnounce, 1, 1}, {kAny, 1}, {kAny, 1}, {kAny, -1}}},
      {"a named receive before the announcement",
       {{kNamed, 1}, {kAnnounce, 1, 1}, {kAny, -1}, {kAnnounce, 1, 2}, {kAny, 1}, {kAny, -1}}},
      {"a named receive after the announcement",
       {{kAnnounce, 1, 1}, {kNamed, 1}, {kAny, -1}, {kAnnounce, 1, 2}, {kAny, 1}, {kAny, -1}}},
      {"a named receive after one from any rank",
       {{kAnnounce, 1, 1},
        {kAny, 1},
        {kNamed, 1},
        {kAnnounce, 1, 2},
        {kAny, -1},
        {kAnnounce, 1, 3},
        {kAny, 1},
        {kAny, -1}}},
      {"named receives of another rank",
       {{kNamed, 2},
        {kNamed, 2},
        {kAnnounce, 1, 1},
        {kAny, 1},
        {kAnnounce, 2, 3},
        {kAny, 2},
        {kAny, -1}}},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    AnnouncedMessages messages;
    std::map<int, int64_t> received;  // As a channel counts them: both kinds of receives.
    for (const Event& event : one.events) {
      if (event.kind == kAnnounce) {
        messages.Announce(event.rank, event.sends, received[event.rank]);
      } else if (event.kind == kNamed) {
        ++received[event.rank];
        messages.TakeFrom(event.rank);
      } else {
        const std::optional<int> from = messages.TakeFirst();
        EXPECT_EQ(from.value_or(-1), event.rank);
        if (from.has_value()) ++received[*from];
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::internal
