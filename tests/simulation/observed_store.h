// The store of a job, as comm/rendezvous/tcp_store_server.h makes it, which reports its decisions.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<ObservedStore> store,
//                       ObservedStore::Create({.address = "10.0.0.7:29400", ...}, &trace));
//
// It reads the messages of the hubs of the job's group and of those that continue it, changes none,
// and adds the events of the store (replacement_rules.h) to `trace`.
//
// A process is lost when the connection by which it has joined a group or asked for the next one
// last has ended without a word, or when the store ends it because it was silent. A process that
// asks again, by the connection to an earlier group, has only given up.

#ifndef EVENKEEL_TESTS_SIMULATION_OBSERVED_STORE_H_
#define EVENKEEL_TESTS_SIMULATION_OBSERVED_STORE_H_

#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/control/server_loop.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/tests/simulation/replacement_rules.h"

namespace evenkeel::simulation {

// Returns the number of a group that continues the job's: 0 for "world", 2 for "world+2"; -1 for
// another group.
int NumberOf(absl::string_view group);

// Adds the event, at the world's time.
void Record(TraceEvent event, ReplacementTrace& trace);

class ObservedStore {
 public:
  static absl::StatusOr<std::unique_ptr<ObservedStore>> Create(const TcpStoreServerOptions& options,
                                                               ReplacementTrace* trace);
  ~ObservedStore();

 private:
  explicit ObservedStore(std::unique_ptr<internal::ServerLoop> loop) : loop_(std::move(loop)) {}

  const std::unique_ptr<internal::ServerLoop> loop_;
  std::thread thread_;
};

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_OBSERVED_STORE_H_
