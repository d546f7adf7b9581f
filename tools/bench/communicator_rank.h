// evenkeel's own backends in the benchmark: each collective as users call it, issued on the user channel and
// waited for.
//
//   CommunicatorCollectives collectives(*comm);
//   return ServeRank({folder, comm->rank(), comm->world_size()}, collectives);
//
// Ownership: the communicator must outlive it.

#ifndef EVENKEEL_TOOLS_BENCH_COMMUNICATOR_RANK_H_
#define EVENKEEL_TOOLS_BENCH_COMMUNICATOR_RANK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/rank_side.h"

namespace evenkeel {
namespace bench {

class CommunicatorCollectives : public Collectives {
 public:
  explicit CommunicatorCollectives(Communicator& communicator) : communicator_(communicator) {}

  std::string WhyNot(const Case& what) override;
  std::shared_ptr<void> AllocateRegistered(int64_t bytes) override;
  std::string Run(const Case& what, void* in, void* out) override;

 private:
  absl::Status Call(const Case& what, void* in, void* out);

  Communicator& communicator_;
};

}  // namespace bench
}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_BENCH_COMMUNICATOR_RANK_H_
