#include "evenkeel/comm/testing/simulated_nccl_meeting.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "evenkeel/comm/arith/reduce_kernels.h"

namespace evenkeel::internal {
namespace {

using Bytes = std::vector<std::byte>;
using Calls = std::map<int, SimulatedCall>;

int64_t BytesIn(const NcclCall& call, int world_size) {
  return call.count * SizeOf(call.dtype) * (SlicesInput(call.kind) ? world_size : 1);
}
int64_t BytesOut(const NcclCall& call, int world_size) {
  return call.count * SizeOf(call.dtype) * (SlicesOutput(call.kind) ? world_size : 1);
}

bool AreEqual(const SimulatedCall& a, const SimulatedCall& b) {
  if (a.call.count != b.call.count || a.call.dtype != b.call.dtype ||
      a.is_registered != b.is_registered)
    return false;
  if (IsPair(a.call.kind)) return true;  // A send and a receive.
  return a.call.kind == b.call.kind && a.call.op == b.call.op && a.scale == b.scale &&
         a.call.root == b.call.root;
}

ReduceOp ReduceOpOf(int op) {
  if (op == kNcclProduct) return ReduceOp::kProduct;
  if (op == kNcclMax) return ReduceOp::kMax;
  if (op == kNcclMin) return ReduceOp::kMin;
  return ReduceOp::kSum;
}

// As the type has it.
double Rounded(double scale, DType dtype) {
  if (dtype == DType::kFloat64) return scale;
  const auto narrow = static_cast<float>(scale);
  if (dtype == DType::kFloat16) return static_cast<float>(Float16(narrow));
  if (dtype == DType::kBFloat16) return static_cast<float>(BFloat16(narrow));
  return narrow;
}

Bytes InputOf(const NcclCall& call, int world_size) {
  Bytes bytes(BytesIn(call, world_size));
  if (!bytes.empty()) std::memcpy(bytes.data(), call.in, bytes.size());
  return bytes;
}

// Not in rank order: NCCL's is its own.
Bytes Reduce(const Calls& calls, int world_size) {
  const SimulatedCall& first = calls.begin()->second;
  const NcclCall& call = first.call;
  const int64_t elements = BytesIn(call, world_size) / SizeOf(call.dtype);
  const bool averages = call.op == kNcclAverage;
  const double scale = Rounded(averages ? 1.0 / world_size : first.scale, call.dtype);
  Bytes sum;
  for (auto at = calls.rbegin(); at != calls.rend(); ++at) {
    Bytes part = InputOf(at->second.call, world_size);
    if (scale != 1.0) Scale(call.dtype, part.data(), elements, scale);
    if (sum.empty()) {
      sum = std::move(part);
    } else {
      Accumulate(ReduceOpOf(call.op), call.dtype, sum.data(), part.data(), elements);
    }
  }
  return sum;
}

void Write(const NcclCall& call, const Bytes& bytes, int64_t begin, int64_t size, int64_t to = 0) {
  if (size > 0) std::memcpy(static_cast<std::byte*>(call.out) + to, bytes.data() + begin, size);
}

void GiveGarbage(const Calls& calls, int world_size) {
  for (const auto& [rank, call] : calls) {
    if (call.call.out != nullptr) std::memset(call.call.out, 0x5a, BytesOut(call.call, world_size));
  }
}

// All inputs are read before any output is written: buffers may be in place.
void Move(const Calls& calls, int world_size) {
  const NcclCall& any = calls.begin()->second.call;
  const int64_t part = any.count * SizeOf(any.dtype);
  if (IsPair(any.kind)) {
    const auto is_send = [](const auto& entry) {
      return entry.second.call.kind == CollectiveKind::kSend;
    };
    const NcclCall& send = std::find_if(calls.begin(), calls.end(), is_send)->second.call;
    const NcclCall& receive = std::find_if_not(calls.begin(), calls.end(), is_send)->second.call;
    return Write(receive, InputOf(send, world_size), 0, part);
  }
  if (any.kind == CollectiveKind::kAllReduce || any.kind == CollectiveKind::kReduce) {
    const Bytes sum = Reduce(calls, world_size);
    for (const auto& [rank, call] : calls) {
      if (any.kind == CollectiveKind::kAllReduce || rank == any.root)
        Write(call.call, sum, 0, part);
    }
    return;
  }
  if (any.kind == CollectiveKind::kReduceScatter) {
    const Bytes sum = Reduce(calls, world_size);
    for (const auto& [rank, call] : calls) Write(call.call, sum, rank * part, part);
    return;
  }
  std::map<int, Bytes> inputs;
  for (const auto& [rank, call] : calls) inputs[rank] = InputOf(call.call, world_size);
  for (const auto& [to, call] : calls) {
    if (any.kind == CollectiveKind::kBroadcast) {
      Write(call.call, inputs[any.root], 0, part);
      continue;
    }
    const bool is_all_to_all = any.kind == CollectiveKind::kAllToAll;
    for (const auto& [from, bytes] : inputs)
      Write(call.call, bytes, is_all_to_all ? to * part : 0, part, from * part);
  }
}

}  // namespace

SimulatedNcclMeeting::Lane SimulatedNcclMeeting::LaneOf(int rank, const NcclCall& call) const {
  if (call.kind == CollectiveKind::kSend) return {rank, call.root};
  if (call.kind == CollectiveKind::kRecv) return {call.root, rank};
  return {-1, -1};
}

std::shared_ptr<SimulatedNcclMeeting::Kernel> SimulatedNcclMeeting::Launch(
    int rank, std::vector<SimulatedCall> calls) {
  auto kernel = std::make_shared<Kernel>();
  kernel->calls = std::move(calls);
  absl::MutexLock lock(&mutex_);
  for (const SimulatedCall& call : kernel->calls)
    kernel->places.push_back(next_[LaneOf(rank, call.call)][rank]++);
  return kernel;
}

SimulatedNcclMeeting::Place& SimulatedNcclMeeting::PlaceOf(int rank, const SimulatedCall& call,
                                                           int64_t place) {
  return places_[LaneOf(rank, call.call)][place];
}

bool SimulatedNcclMeeting::IsDone(int rank, const Kernel& kernel) {
  if (aborted_[rank]) return true;
  for (size_t i = 0; i < kernel.calls.size(); ++i) {
    if (!PlaceOf(rank, kernel.calls[i], kernel.places[i]).is_done) return false;
  }
  return true;
}

void SimulatedNcclMeeting::Run(int rank, const std::shared_ptr<Kernel>& kernel) {
  absl::MutexLock lock(&mutex_);
  if (aborted_[rank]) return;
  for (size_t i = 0; i < kernel->calls.size(); ++i)
    Arrive(rank, kernel->calls[i], kernel->places[i]);
  const auto is_done = [&]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return IsDone(rank, *kernel); };
  mutex_.Await(absl::Condition(&is_done));
}

void SimulatedNcclMeeting::Arrive(int rank, const SimulatedCall& call, int64_t at) {
  Place& place = PlaceOf(rank, call, at);
  place.calls[rank] = call;
  const size_t wanted = IsPair(call.call.kind) ? 2 : static_cast<size_t>(world_size_);
  if (place.calls.size() == wanted) Meet(place);
}

void SimulatedNcclMeeting::Meet(Place& place) {
  const SimulatedCall& first = place.calls.begin()->second;
  bool are_equal = true, have_equal_size = true;
  for (const auto& [rank, call] : place.calls) {
    are_equal = are_equal && AreEqual(call, first);
    have_equal_size = have_equal_size && call.call.count * SizeOf(call.call.dtype) ==
                                             first.call.count * SizeOf(first.call.dtype);
  }
  if (!have_equal_size) return;  // For ever.
  if (are_equal) {
    Move(place.calls, world_size_);
  } else {
    ++garbage_;
    GiveGarbage(place.calls, world_size_);
  }
  place.is_done = true;
  place.calls.clear();
}

void SimulatedNcclMeeting::Abort(int rank) {
  absl::MutexLock lock(&mutex_);
  aborted_[rank] = true;
  for (auto& [lane, places] : places_) {
    for (auto& [at, place] : places) place.calls.erase(rank);
  }
}

int64_t SimulatedNcclMeeting::garbage() const {
  absl::MutexLock lock(&mutex_);
  return garbage_;
}

}  // namespace evenkeel::internal
