// A case of the benchmark: one collective of float32, of one size, on ranks that hold known values.
//
//   const Case what{.op = Op::kAllGather, .bytes = 1 << 20, .world = 4};
//   std::vector<float> in(what.in_count()), out(what.out_count());
//   Fill(what, rank, in.data(), out.data());
//   // ... the collective ...
//   // empty, or "element 17 of 40 is 3 instead of 5"
//   std::string wrong = FindWrong(what, rank, out.data());
//
// Units:   `bytes` is what nccl-tests call the size: the whole buffer of all_reduce, broadcast,
//          reduce, send_recv and all_to_all, the output of all_gather, the input of reduce_scatter.
//          Counts are in elements.
// Shapes:  all_reduce, reduce and broadcast work in place, on `out`, and have no input.
// Threads: values and pure functions.

#ifndef EVENKEEL_TOOLS_BENCH_CASE_H_
#define EVENKEEL_TOOLS_BENCH_CASE_H_

#include <cstdint>
#include <string>

#include "evenkeel/comm/collective.h"

namespace evenkeel::bench {

// kSend stands for send_recv: every rank sends to the next one and receives from the previous one.
using Op = CollectiveKind;
inline constexpr Op kAllOps[] = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather, Op::kBroadcast,
                                 Op::kReduce,    Op::kAllToAll,      Op::kSend,      Op::kBarrier};
std::string NameOf(Op op);

inline constexpr int kRoot = 0;

struct Case {
  Op op = Op::kAllReduce;
  int64_t bytes = 0;
  int world = 1;

  // Whether each rank has a part of the data of its own.
  bool has_parts() const { return SlicesInput(op) || SlicesOutput(op); }
  int64_t count() const { return bytes / static_cast<int64_t>(sizeof(float)); }
  int64_t part() const { return count() / world; }
  int64_t in_count() const {
    if (IsInPlace(op) || op == Op::kBarrier) return 0;
    return op == Op::kAllGather ? part() : count();
  }
  int64_t out_count() const {
    if (op == Op::kBarrier) return 0;
    return op == Op::kReduceScatter ? part() : count();
  }
  friend bool operator==(const Case&, const Case&) = default;
};

// The nearest size from there down that a collective can have: a whole number of elements, and of
// parts; at least one.
int64_t WholeBytes(const Case& what);

// Returns the value of rank `rank` at element `i` before the collective: 0 to 3, as if by chance,
// so that neither a shift nor a part of another rank passes the check.
int Value(int rank, int64_t i);

// Returns the value that this rank must have at element `i` afterwards.
int Expected(const Case& what, int rank, int64_t i);

// Gives a rank's buffers what they must have before the collective. An output holds no result yet.
void Fill(const Case& what, int rank, float* in, float* out);

// Returns an empty text if the collective has done what it must.
std::string FindWrong(const Case& what, int rank, const float* out);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_CASE_H_
