// A case of the benchmark: one collective, of one size, on ranks that hold known values.
//
//   const Case what{
//       .op = Op::kAllGather, .scalar = Scalar::kFloat32, .bytes = 1 << 20, .world = 4};
//   std::vector<std::byte> in(what.in_bytes()), out(what.out_bytes());
//   Fill(what, rank, in.data(), out.data());
//   // ... the collective ...
//   // empty, or "element 17 is 3 instead of 5"
//   std::string wrong = FindWrong(what, rank, out.data());
//
// Units:   `bytes` is what nccl-tests call the size: the whole buffer of all_reduce, broadcast,
//          reduce, send_recv and all_to_all, the output of all_gather, the input of reduce_scatter.
// Shapes:  all_reduce, reduce and broadcast work in place, on `out`, and have no input.
// Threads: values and pure functions.
//
// The standard library and nothing else: an MPI's compiler takes this in, too (mpi_rank.cc).

#ifndef EVENKEEL_TOOLS_BENCH_CASE_H_
#define EVENKEEL_TOOLS_BENCH_CASE_H_

#include <cstdint>
#include <cstring>
#include <string>

namespace evenkeel::bench {

// send_recv: every rank sends to the next one and receives from the previous one.
enum class Op {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAllToAll,
  kBarrier,
  kSendRecv
};
constexpr Op kAllOps[] = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather, Op::kBroadcast,
                          Op::kReduce,    Op::kAllToAll,      Op::kSendRecv,  Op::kBarrier};

inline const char* NameOf(Op op) {
  static const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "reduce",     "all_to_all",     "barrier",    "send_recv"};
  return names[static_cast<int>(op)];
}

enum class Scalar { kFloat32, kFloat64, kFloat16, kBFloat16, kInt32, kInt64 };
constexpr Scalar kAllScalars[] = {Scalar::kFloat32,  Scalar::kFloat64, Scalar::kFloat16,
                                  Scalar::kBFloat16, Scalar::kInt32,   Scalar::kInt64};

inline const char* NameOf(Scalar scalar) {
  static const char* const names[] = {"float32",  "float64", "float16",
                                      "bfloat16", "int32",   "int64"};
  return names[static_cast<int>(scalar)];
}

inline int64_t SizeOf(Scalar scalar) {
  if (scalar == Scalar::kFloat64 || scalar == Scalar::kInt64) return 8;
  return scalar == Scalar::kFloat16 || scalar == Scalar::kBFloat16 ? 2 : 4;
}

// Roots and worlds: sums of one value from each rank stay exact in every type up to so many ranks.
constexpr int kRoot = 0;
constexpr int kMostRanks = 64;

struct Case {
  Op op = Op::kAllReduce;
  Scalar scalar = Scalar::kFloat32;
  int64_t bytes = 0;
  int world = 1;
  bool registered = false;  // In memory that the transport has given out.

  bool is_in_place() const {
    return op == Op::kAllReduce || op == Op::kReduce || op == Op::kBroadcast;
  }
  // Whether each rank has a part of the data of its own.
  bool has_parts() const {
    return op == Op::kAllGather || op == Op::kReduceScatter || op == Op::kAllToAll;
  }
  int64_t count() const { return bytes / SizeOf(scalar); }
  int64_t part() const { return count() / world; }  // Elements.
  int64_t in_bytes() const {
    if (is_in_place() || op == Op::kBarrier) return 0;
    return op == Op::kAllGather ? bytes / world : bytes;
  }
  int64_t out_bytes() const {
    if (op == Op::kBarrier) return 0;
    return op == Op::kReduceScatter ? bytes / world : bytes;
  }
  bool operator==(const Case& other) const {
    return op == other.op && scalar == other.scalar && bytes == other.bytes &&
           world == other.world && registered == other.registered;
  }
};

// The nearest size from there down that a collective can have: a whole number of elements, and of
// parts; at least one.
inline int64_t WholeBytes(Case what) {
  if (what.op == Op::kBarrier) return 0;
  const int64_t step = SizeOf(what.scalar) * (what.has_parts() ? what.world : 1);
  return what.bytes < step ? step : what.bytes / step * step;
}

// Returns the value of rank `rank` at element `i` before the collective: 0 to 3, as if by chance,
// so that neither a shift nor a part of another rank passes the check.
inline int Value(int rank, int64_t i) {
  uint32_t mixed =
      static_cast<uint32_t>(i) * 0x9E3779B1u + static_cast<uint32_t>(rank) * 0x7FEB352Du;
  mixed ^= mixed >> 15;
  mixed *= 0x846CA68Bu;
  return static_cast<int>(mixed >> 13 & 3);
}

// Returns the value that this rank must have at element `i` afterwards.
inline int Expected(const Case& what, int rank, int64_t i) {
  const auto sum = [&](int64_t at) {
    int total = 0;
    for (int each = 0; each < what.world; ++each) total += Value(each, at);
    return total;
  };
  const int64_t part = what.part();
  switch (what.op) {
    case Op::kAllReduce:
    case Op::kReduce:
      return sum(i);
    case Op::kReduceScatter:
      return sum(rank * part + i);
    case Op::kAllGather:
      return Value(static_cast<int>(i / part), i % part);
    case Op::kAllToAll:
      return Value(static_cast<int>(i / part), rank * part + i % part);
    case Op::kBroadcast:
      return Value(kRoot, i);
    case Op::kSendRecv:
      return Value((rank + what.world - 1) % what.world, i);
    case Op::kBarrier:
      break;
  }
  return 0;
}

// The bits of a 16-bit float that is a small whole number, of which all digits fit.
inline uint16_t HalfBits(int value, int exponent_bits) {
  if (value == 0) return 0;
  int exponent = 0;
  while (value >> (exponent + 1) != 0) ++exponent;
  const int digits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int fraction =
      exponent <= digits ? value << (digits - exponent) : value >> (exponent - digits);
  return static_cast<uint16_t>((exponent + bias) << digits | (fraction & ((1 << digits) - 1)));
}

// Elements as they lie in memory, from small whole numbers.
template <typename T>
struct PlainForm {
  using Type = T;
  T operator()(int value) const { return static_cast<T>(value); }
};
template <int kExponentBits>
struct HalfForm {
  using Type = uint16_t;
  uint16_t operator()(int value) const { return HalfBits(value, kExponentBits); }
};

// use(form) with the form of that type.
template <typename Use>
auto WithForm(Scalar scalar, const Use& use) {
  switch (scalar) {
    case Scalar::kFloat64:
      return use(PlainForm<double>());
    case Scalar::kFloat16:
      return use(HalfForm<5>());
    case Scalar::kBFloat16:
      return use(HalfForm<8>());
    case Scalar::kInt32:
      return use(PlainForm<int32_t>());
    case Scalar::kInt64:
      return use(PlainForm<int64_t>());
    case Scalar::kFloat32:
      break;
  }
  return use(PlainForm<float>());
}

// Gives a rank's buffers what they must have before the collective. What it will only write holds
// no result yet.
inline void Fill(const Case& what, int rank, void* in, void* out) {
  WithForm(what.scalar, [&](auto form) {
    using T = typename decltype(form)::Type;
    if (!what.is_in_place() && what.out_bytes() > 0) std::memset(out, 0xff, what.out_bytes());
    T* const data = static_cast<T*>(what.is_in_place() ? out : in);
    const int64_t count = (what.is_in_place() ? what.out_bytes() : what.in_bytes()) / sizeof(T);
    for (int64_t i = 0; i < count; ++i) data[i] = form(Value(rank, i));
  });
}

// Empty if the collective has done what it must.
inline std::string FindWrong(const Case& what, int rank, const void* out) {
  if (what.op == Op::kReduce && rank != kRoot) return "";  // Nobody has promised anything.
  return WithForm(what.scalar, [&](auto form) -> std::string {
    using T = typename decltype(form)::Type;
    const T* const data = static_cast<const T*>(out);
    const int64_t count = what.out_bytes() / sizeof(T);
    for (int64_t i = 0; i < count; ++i) {
      const int expected = Expected(what, rank, i);
      const T wanted = form(expected);
      if (std::memcmp(&data[i], &wanted, sizeof(T)) == 0) continue;
      std::string is = "something else";
      for (int other = 0; other <= 3 * what.world; ++other) {
        const T known = form(other);
        if (std::memcmp(&data[i], &known, sizeof(T)) == 0) is = std::to_string(other);
      }
      return "element " + std::to_string(i) + " of " + std::to_string(count) + " is " + is +
             " instead of " + std::to_string(expected);
    }
    return "";
  });
}

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_CASE_H_
