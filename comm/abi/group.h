// A group of ranks behind std types alone: the interface of libevenkeel.so.
//
//   evenkeel::abi::Options options{.rank = 0, .world_size = 2};
//   evenkeel::abi::Failure failure;
//   std::unique_ptr<evenkeel::abi::Group> group =
//       evenkeel::abi::CreateGroup(store, options, &failure);
//   if (group == nullptr) throw MyError(failure.message);
//   auto work = group->Issue({.kind = Kind::kAllReduce, .out = {{data, n, DType::kFloat32}}});
//   if (!work->Wait()) throw MyError(work->failure().message);
//
// For adapters that are built apart from evenkeel, such as the bridge to torch.distributed: no type
// of Abseil is in this header, and the library exports only it and join/abi/step_monitor.h.
// Everybody else uses comm/communicator.h, whose contracts hold here too.
//
// Threads:   Group and Work are thread-safe. Ranks must agree on the order of their Issue() calls.
// Ownership: buffers must live, and must not be accessed, until their work has ended.
// Errors:    no exception leaves. A call that is wrong by itself fails alone, with code
//            kInvalidArgument or kUnimplemented; any other failure ends the group on every rank,
//            and each later call reports the first cause.

#ifndef EVENKEEL_COMM_ABI_GROUP_H_
#define EVENKEEL_COMM_ABI_GROUP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/comm/dtype.h"

#define EVENKEEL_EXPORT __attribute__((visibility("default")))

namespace evenkeel::abi {

// The numbers of absl::StatusCode.
enum class Code : int {
  kOk = 0,
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

struct Failure {
  Code code = Code::kOk;
  std::string message;
  // See comm/failure_info.h; empty and -1 where nothing is known.
  std::string kind;
  std::vector<int> ranks;
  std::string operation;
  int64_t position = -1;
};

struct Buffer {
  void* data = nullptr;
  int64_t count = 0;  // Elements.
  DType dtype = DType::kFloat32;
};

enum class Kind : int {
  kAllReduce,  // `out`: reduced in place.
  kReduce,     // `out`: reduced in place on `root`, unspecified on other ranks.
  kBroadcast,  // `out`: read on `root`, written on other ranks.
  kAllGather,  // `in`: one buffer; `out`: one per rank, or one for all. Sizes may differ by rank.
  kReduceScatter,  // `in`: one per rank of equal size, or one for all; `out`: one.
  kAllToAll,       // `in`, `out`: one per rank. Sizes may differ.
  kBarrier,
  kSend,  // `in`, to the rank `root`.
  kRecv,  // `out`, from the rank `root`.
};

struct Call {
  Kind kind = Kind::kBarrier;
  std::vector<Buffer> in;
  std::vector<Buffer> out;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;
  // kRecv: if it is not null, the message is that of any other rank, which is here once the work
  // has ended with kOk. Must live as long as the buffers.
  int* from = nullptr;
  // Messages with different tags do not wait for each other. Not negative.
  int64_t tag = 0;
  std::chrono::milliseconds timeout{0};  // 0: the group's.
};

class Work {
 public:
  virtual ~Work() = default;
  virtual bool IsDone() const = 0;
  // Waits for the end, at most until the call's deadline; returns whether it succeeded.
  virtual bool Wait() = 0;
  // Valid once the work has ended; code kOk if it succeeded.
  virtual Failure failure() const = 0;
  // Calls `callback` once, on the thread that ends the work, or at once if it has ended. The
  // callback must not block. It may go on on another thread: while it holds `pending`, this rank
  // counts as one that can issue something, so that no deadlock is seen where there is none.
  virtual void OnDone(std::function<void(std::shared_ptr<void> pending)> callback) = 0;
};

class Group {
 public:
  // Without Finish(): peers see an abort.
  virtual ~Group() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string backend() const = 0;  // "shm", "tcp", "hierarchical", "local".
  // Never null. A call that is refused gives a work that has ended.
  virtual std::shared_ptr<Work> Issue(const Call& call) = 0;
  // Waits for all ranks. At the timeout it fails with all missing ranks in `ranks`, and the group
  // ends.
  virtual Failure MonitoredBarrier(std::chrono::milliseconds timeout) = 0;
  // Returns zeroed memory that the backend uses without a copy; freed with the last handle. Null:
  // there is not enough.
  virtual std::shared_ptr<void> Allocate(int64_t bytes) = 0;
  // kOk while the group works, else the first cause of its end.
  virtual Failure failure() const = 0;
  // Ends the group on all ranks, with this reason.
  virtual void Abort(const std::string& why) = 0;
  // Leaves the group. Waits for what this rank has issued, except receives, and not for other
  // ranks: those may still finish what needs nothing more of this rank; what does need it fails
  // there, and names it. Rank 0 of a group hosts its hub: when a process leaves the last group of
  // which it is rank 0, it waits for the other ranks to leave, for at most 5 seconds. Afterwards
  // every call fails.
  virtual Failure Leave(std::chrono::milliseconds timeout) = 0;
  // Writes this rank's last collectives, see comm/flight_dump.h; and returns them.
  virtual std::string FlightJson() const = 0;
};

// Where ranks find each other: the caller's store. Its content is the root of trust: whoever reads
// it can join the group. May block; throws nothing: reports an error by returning false.
class Store {
 public:
  virtual ~Store() = default;
  virtual bool Set(const std::string& key, const std::string& value, std::string* error) = 0;
  // Waits for the key.
  virtual bool Get(const std::string& key, std::chrono::milliseconds timeout, std::string* value,
                   std::string* error) = 0;
};

struct Options {
  int rank = 0;
  int world_size = 1;
  // The ranks of the job that form the group, in the group's order. All ranks must pass the same
  // list, which is compared; empty on all ranks: no comparison.
  std::vector<int> members = {};
  std::string name = "world";    // The group's, for messages and flight records.
  std::string backend = "auto";  // See comm/factory.h.
  // The address of this host for the other ranks. Empty: EVENKEEL_ADDRESS, else that of the route
  // to `route_to` (the host of the caller's store), else the loopback address.
  std::string address;
  std::string route_to;
  std::chrono::milliseconds timeout{600'000};  // Per operation.
  std::chrono::milliseconds connect_timeout{120'000};
  std::function<void(const std::string&)> warn;  // Receives warnings; null: stderr.
};

// Waits until all ranks have called it. Null: `failure` says why not.
EVENKEEL_EXPORT std::unique_ptr<Group> CreateGroup(Store& store, const Options& options,
                                                   Failure* failure);

// Returns the version of this library. An adapter refuses another one than it was built with.
EVENKEEL_EXPORT const char* Version();

}  // namespace evenkeel::abi

#endif  // EVENKEEL_COMM_ABI_GROUP_H_
