// The connections of one rank with all others: a gloo::Context whose pairs we make, connect and break ourselves.
//
// Threads: Open() and Connect() by one thread; Break() from any thread, at any time after Open().
// Errors:  all methods but Break() throw what Gloo throws.

#ifndef EVENKEEL_COMM_INTERNAL_GLOO_MESH_H_
#define EVENKEEL_COMM_INTERNAL_GLOO_MESH_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace gloo {
class Context;
namespace transport {
class Pair;
}  // namespace transport
}  // namespace gloo

namespace evenkeel::internal {

class EndableContext;

class GlooMesh {
 public:
  // Starts to listen for each other rank, for `connect_timeout` in Connect().
  GlooMesh(int rank, int world_size, const std::string& bind_address, absl::Duration connect_timeout);
  ~GlooMesh();

  // The addresses of this rank's ends, by peer.
  std::vector<std::string> Addresses() const;
  // `theirs`: by peer, the address of its end towards this rank. Blocks until all are connected.
  void Connect(const std::vector<std::string>& theirs);
  // Ends every wait on this rank's connections with an exception; the peers see closed connections.
  void Break();

  const std::shared_ptr<gloo::Context>& context() const { return context_; }

 private:
  void ForEachPair(absl::FunctionRef<void(int peer, gloo::transport::Pair& pair)> visit) const;

  std::shared_ptr<gloo::Context> context_;
  std::shared_ptr<EndableContext> endable_;  // What context_ runs over.
  std::atomic<bool> is_connected_ = false;
  std::atomic<bool> is_broken_ = false;
};

// Gloo's timeout that ends at `deadline`.
std::chrono::milliseconds GlooTimeout(absl::Time deadline);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_GLOO_MESH_H_
