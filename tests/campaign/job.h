// A run of the trainer whose ranks are killed and replaced, as processes that this one starts. It
// hosts the store, so that any rank may be lost.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start({.flags = {"--model=mlp"}}));
//   job->Listen(deadline, [&] { return job->state() == Job::State::kTraining; });
//   if (job->MayKill({2})) job->Kill(2);
//   job->Listen(deadline, [&] { return job->is_over(); });
//
// The moments of the job are seen from outside: the store reports when a group ends and when the
// next one is made; a process writes to --sample_log as it begins to train in a group; rank 0
// writes --metrics at the end of a step and of an evaluation.
//
//   kTraining -> kUnevenStep -> kEvaluating -> kTraining ...
//      | a rank is killed, or a group ends
//   kGathering -> kMoving, when the next group is made -> kTraining, when all its ranks train
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TESTS_CAMPAIGN_JOB_H_
#define EVENKEEL_TESTS_CAMPAIGN_JOB_H_

#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/tests/campaign/hosts.h"
#include "evenkeel/tests/child_processes.h"

namespace evenkeel {

// The complete lines that other processes append to a file.
class Tail {
 public:
  explicit Tail(std::string path) : path_(std::move(path)) {}
  // Returns the lines since the last call.
  std::vector<std::string> Next();

 private:
  const std::string path_;
  int64_t offset_ = 0;
};

struct JobOptions {
  std::string train;               // The program.
  std::vector<std::string> flags;  // Also --on_failure.
  std::string folder;              // For the files of the run; is emptied first.
  int ranks = 4;
  bool replaces = true;                // A process takes the place of each that is killed.
  const HostNetwork* hosts = nullptr;  // Null: all ranks are on this host.
  std::vector<int> host_of;            // By rank, with `hosts`.
  // Steps after which the test data is evaluated, and those in which not all ranks have samples.
  std::set<int64_t> evaluated, uneven;
};

class Job {
 public:
  enum class State { kStarting, kTraining, kUnevenStep, kEvaluating, kGathering, kMoving };

  static absl::StatusOr<std::unique_ptr<Job>> Start(const JobOptions& options);

  // Follows the job until `is_met`, or the deadline: false.
  bool Listen(absl::Time deadline, absl::FunctionRef<bool()> is_met);

  State state();
  int64_t steps() const { return steps_; }  // The highest that a rank has begun.
  // Returns whether a process of that place is running; it has a state once it trains.
  bool is_running(int place) const;
  bool has_state(int place) const;
  // Returns whether another process has a state, without which the job cannot go on.
  bool MayKill(const std::vector<int>& places) const;
  void Kill(int place);
  // The pause before the next process of a place starts; default: none.
  void SetPause(absl::Duration pause) { pause_ = pause; }
  // Returns when the last process of a place was started.
  absl::Time started(int place) const { return places_[place].started; }

  // Returns whether no process trains any more; or some have begun to report the end.
  bool is_over() const;
  bool ends() const { return is_over() || metrics().contains("test") || ended_well_ > 0; }
  // Returns an error for processes that failed without having been killed.
  absl::Status status() const;
  // The lines of --metrics: "step 12", "evaluation 14", "epoch 1" and "test", without times and the
  // losses. A line that is written again, by the next rank 0, must be the same where ranks are
  // replaced; else the later one counts.
  const std::map<std::string, nlohmann::json>& metrics() const { return lines_; }
  const std::set<int64_t>& evaluated() const { return evaluated_; }
  const std::set<int64_t>& uneven() const { return uneven_; }
  std::string SampleLog() const { return options_.folder + "/samples"; }
  std::string Saved() const { return options_.folder + "/weights.safetensors"; }
  std::string Complaints() const;

 private:
  struct Place {
    int child = -1;  // Of the last process.
    int incarnation = -1;
    int group = -1;  // The newest one in which it trains; -1: none, it has no state.
    bool is_killed = false;
    bool is_due = false;  // Another process will be started.
    absl::Time start_at, started;
    std::unique_ptr<Tail> samples;
  };

  explicit Job(const JobOptions& options);
  absl::Status StartPlace(int place);
  void FollowFiles();
  void FollowProcesses();
  void NoteLine(const std::string& kind, nlohmann::json event);

  const JobOptions options_;
  std::unique_ptr<TcpStoreServer> server_;
  ChildProcesses children_;
  std::vector<Place> places_;
  absl::Duration pause_;
  Tail metrics_;
  int64_t reported_ = -1;      // The newest step in the metrics.
  bool is_evaluated_ = false;  // The evaluation after that step is over.
  std::set<int64_t> evaluated_, uneven_;
  int64_t steps_ = 0;
  int ended_well_ = 0;
  std::vector<std::string> failures_;
  std::map<std::string, nlohmann::json> lines_;
  absl::Mutex mutex_;
  int lost_in_ = -1;                        // The newest group when the last rank was killed.
  int made_ ABSL_GUARDED_BY(mutex_) = -1;   // The newest group.
  int ended_ ABSL_GUARDED_BY(mutex_) = -1;  // The newest group that has ended with an error.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CAMPAIGN_JOB_H_
