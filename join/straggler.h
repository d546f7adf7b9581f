// Finds the ranks that make the others wait, and the phase of the step in which they do.
//
//   // In a loop, on any rank: a sentence when a rank has become slow, else empty.
//   if (const std::string news = StragglerNews(comm); !news.empty()) Log(news);
//   // "rank 3 cost the group 18 % of the last 500 steps: input"
//   StragglersOf(comm).Table();                // of all steps since the group began
//
// A collective makes all ranks equally slow, so the ranks' step times do not show which one is the
// cause. But all ranks leave a reduction together. Between two reductions each rank is busy for a
// time of its own, then waits for the rank that was busy for longest. The ranks send these times
// with their next step's record (join/steps); no further message or collective is necessary, no
// clocks are compared, and each rank comes to the same report (a rank whose next step has begun may
// have one step more). join/steps/straggler_report.h defines its terms.
//
// Steps:   those with a reduction (DataParallel), in a group with agreement (JoinOptions::enable).
//          Several reductions in one step count as one.
// Threads: thread-safe.
// Devices: times are those of the host, so that a slow device is not seen.

#ifndef EVENKEEL_JOIN_STRAGGLER_H_
#define EVENKEEL_JOIN_STRAGGLER_H_

#include <functional>
#include <string>

#include "evenkeel/join/steps/straggler_report.h"

namespace evenkeel {

class Communicator;

// Returns the report about all steps of this group, which marks no straggler; or about the most
// recent ones: 500, more if they are short (10 s), fewer if they are long (100 s).
StragglerReport StragglersOf(Communicator& comm);
StragglerReport RecentStragglersOf(Communicator& comm);

// Returns StragglerReport::Stragglers() of the recent steps when a rank has become a straggler, or
// is one in another phase, since the last call in this group; else "". Cheap enough for every step.
std::string StragglerNews(Communicator& comm,
                          const std::function<std::string(int rank)>& name_of = nullptr);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STRAGGLER_H_
