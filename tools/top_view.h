// Texts that describe a running job: what tools:top shows.
//
//   nlohmann::json status = nlohmann::json::parse(json);          // TcpObserver::Status()
//   std::cout << RenderStatus(status, server, {.columns = 80, .rows = 24});
//   for (const std::string& line : Findings(status[0])) ...
//
// Errors: a field that is missing or has another type throws nlohmann::json::exception.
// Threads: pure functions of values.

#ifndef EVENKEEL_TOOLS_TOP_VIEW_H_
#define EVENKEEL_TOOLS_TOP_VIEW_H_

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace evenkeel {

struct Screen {
  int columns = 80;
  int rows = 24;  // If the ranks do not fit, those that explain a delay come first.
};

// Returns what explains why a group is slow or does not go on, the gravest first:
//   "the group has ended: rank 1 was lost: ..."
//   "rank 3 has sent nothing for 4.1 s"
//   "ranks 0,2 have waited for 3.2 s for rank 1, which runs (input)"
//   "ranks 0,1,2 have waited for 3.2 s for each other", "rank 1: waits in ...", "ranks 0,2: ..."
//   "rank 1 costs the group 18 % of its time: input"
//   "ranks 5,7 have no more input"
std::vector<std::string> Findings(const nlohmann::json& group);
inline constexpr char kGroupHasEnded[] = "the group has ended: ";  // Begins the first of them.

// Returns lines of at most `screen.columns` characters: per group a headline, the findings, and a
// table of the ranks.
std::string RenderStatus(const nlohmann::json& status, const std::string& server,
                         const Screen& screen);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_TOP_VIEW_H_
