// Runs of the trainer whose ranks are killed at random moments, compared with the undisturbed run.
//
//   EK_ASSIGN_OR_RETURN(const CampaignResult result,
//                       RunCampaign({.train = "trainer/train", .model = "mlp", .backend = "shm",
//                                    .folder = folder, .kills = 20, .seed = 7}));
//   std::cout << TableRow(options, result);
//
// A run is right if its weights, buffers, loss and metrics are those of the undisturbed run, bit
// for bit, the processes that were not killed end well, and the log of samples has each sample once
// in each epoch. A process that has a state is always left.
//
// If the others go on without lost ranks, the run has another history: the groups in the log of
// samples. It is compared with a chain of undisturbed runs, one for each group, with as many ranks;
// each begins with a checkpoint of the one before, of the step from which the group went on.
// Weights and optimizer state must be the same, and for models without buffers the loss.
//
// Threads: call it from the main thread.
// Errors:  those of starting processes, and if the undisturbed run fails. The result counts runs
//          that are wrong, and `log` has the reasons.

#ifndef EVENKEEL_TESTS_CAMPAIGN_CAMPAIGN_H_
#define EVENKEEL_TESTS_CAMPAIGN_CAMPAIGN_H_

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

struct CampaignOptions {
  std::string train;    // The program.
  std::string network;  // tests/hosts/network.sh.
  std::string folder;   // TEST_TMPDIR, for files; those of wrong runs stay.
  std::string model = "mlp";
  std::string backend = "shm";  // hierarchical: on two hosts, which are network namespaces.
  int runs = 0;                 // At least so many,
  int kills = 0;                // until so many ranks were killed.
  // Lost ranks are replaced, or the others go on without them.
  enum class Play { kReplace, kContinue } play = Play::kReplace;
  uint64_t seed = 0;
  bool is_short = false;  // For tests: a quarter of the steps, and a few kills.
  std::FILE* log = stderr;
};

// The moment of a kill, as it is seen from outside at most a millisecond before.
enum class KillPhase { kStep, kUnevenStep, kEvaluation, kRecovery, kNewcomerStart, kTransfer };

struct CampaignResult {
  int runs = 0;
  int kills = 0;
  std::map<KillPhase, int> by_phase;
  int of_rank_zero = 0;
  int of_two_at_once = 0;  // Kills, not pairs.
  int wrong = 0;
  int hangs = 0;
  absl::Duration slowest;  // From a kill until all ranks train again, with later kills between.
};

absl::StatusOr<CampaignResult> RunCampaign(const CampaignOptions& options);

// Return a table in Markdown.
std::string TableHead();
std::string TableRow(const CampaignOptions& options, const CampaignResult& result);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CAMPAIGN_CAMPAIGN_H_
