// A transport on one rank, and the contender that measures it on all ranks of a job.
//
//   class MyTransport : public Transport { ... };
//   EK_ASSIGN_OR_RETURN(Meeting meeting, Meeting::Create(&comm, folder));
//   MyTransport mine;
//   RankContender contender("mine", &mine, /*registered=*/false, meeting);
//   EK_ASSIGN_OR_RETURN(std::vector<double> seconds, contender.Time(what, {.repetitions = 10}));
//
// Before each repetition all ranks meet in a barrier of their own, which they map from a file:
// after the transport's barrier, ranks may be apart by more than the time that is measured. A
// repetition lasts from there to the end of the collective on this rank; the slowest rank's time
// counts. The other transports of a rank are idle meanwhile.
//
// Order:   all ranks call the contenders in the same order.
// Errors:  those of the transport on the rank that fails. The caller then aborts the group and ends
//          the process, because other ranks may wait for it in a block. A block that takes longer
//          than two minutes ends the process by SIGALRM.

#ifndef EVENKEEL_TOOLS_BENCH_TRANSPORT_H_
#define EVENKEEL_TOOLS_BENCH_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/sweep.h"

namespace evenkeel::bench {

class Transport {
 public:
  virtual ~Transport() = default;

  // Returns Unimplemented, on all ranks, for a case that the transport does not support.
  virtual absl::Status Supports(const Case& what) const = 0;
  // Returns memory that the transport has registered; Unimplemented if it registers none.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes);
  virtual absl::Status Run(const Case& what, float* in, float* out) = 0;
};

// evenkeel's own backends: each collective as users call it, issued on the user channel and waited
// for. The communicator must outlive it.
std::unique_ptr<Transport> OverCommunicator(Communicator& communicator);

// Returns OK for all_reduce and Unimplemented for other collectives: Supports() of the transports
// of other libraries.
absl::Status OnlyAllReduce(const Case& what, absl::string_view library);

// A barrier for ranks that are processes, in memory that they share; zeros at first. No rank sleeps
// in it: a rank that is woken up starts late, perhaps on the core of the rank that has woken it.
struct SharedBarrier {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;
  std::atomic<uint64_t> entered;  // How often a collective barrier that is checked was entered.

  void Wait(int world);
};

// The parts of a job that all contenders of a rank share.
struct Meeting {
  Communicator* comm = nullptr;
  SharedBarrier* barrier = nullptr;  // Mapped until the process ends.
  struct Buffers {
    Case what;
    std::shared_ptr<void> in, out;
  };
  std::shared_ptr<Buffers> buffers = std::make_shared<Buffers>();  // Of ordinary memory.

  // All ranks pass the same existing folder. Returns Unavailable if no file can be mapped there.
  static absl::StatusOr<Meeting> Create(Communicator* comm, const std::string& folder);
};

class RankContender : public Contender {
 public:
  // The transport must outlive it.
  RankContender(std::string name, Transport* transport, bool registered, const Meeting& meeting)
      : name_(std::move(name)),
        transport_(transport),
        registered_(registered),
        meeting_(meeting),
        buffers_(registered ? std::make_shared<Meeting::Buffers>() : meeting.buffers) {}

  const std::string& name() const override { return name_; }
  bool registered() const override { return registered_; }
  absl::StatusOr<std::vector<double>> Time(const Case& what, const Block& block) override;
  absl::Status Check(const Case& what) override;
  void Forget() override { *buffers_ = {}; }

 private:
  absl::Status Prepare(const Case& what);
  absl::Status Allocate(const Case& what);
  absl::StatusOr<std::shared_ptr<void>> Zeros(int64_t bytes);
  absl::Status Run(const Case& what);
  absl::StatusOr<std::string> RunAndFindWrong(const Case& what);
  absl::StatusOr<std::string> RunBarriers(const Case& what);
  int rank() const { return meeting_.comm->rank(); }
  float* in() const { return static_cast<float*>(buffers_->in.get()); }
  float* out() const { return static_cast<float*>(buffers_->out.get()); }

  const std::string name_;
  Transport* const transport_;
  const bool registered_;
  const Meeting meeting_;
  const std::shared_ptr<Meeting::Buffers> buffers_;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_TRANSPORT_H_
