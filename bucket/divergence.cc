#include "evenkeel/bucket/divergence.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

absl::Status Check(absl::Span<const NamedView> tensors, Device device,
                   const DivergenceOptions& options) {
  if (options.parts < 1 || options.part < 0) {
    return absl::InvalidArgumentError(absl::StrCat("divergence: part ", options.part, " of ",
                                                   options.parts, " parts does not exist"));
  }
  for (const NamedView& tensor : tensors) {
    if (tensor.view.device.is_cpu() || tensor.view.device == device) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("divergence: \"", tensor.name, "\" is ", ToString(tensor.view),
                     ", the group's tensors lie on ", ToString(device)));
  }
  return absl::OkStatus();
}

// The pieces in which tensors are read: so much of a device's tensors is copied to the host at
// once.
constexpr int64_t kPiece = int64_t{4} << 20;

// Returns a hash of the bytes. Four independent lanes hide the latency of the multiplications: this
// reads memory about as fast as it arrives.
uint64_t HashOfBytes(uint64_t seed, const char* data, int64_t bytes) {
  constexpr int kLanes = 4;
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;
  uint64_t lanes[kLanes] = {seed, seed + 1, seed + 2, seed + 3};
  int64_t at = 0;
  for (; at + static_cast<int64_t>(sizeof(lanes)) <= bytes; at += sizeof(lanes)) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, sizeof(words));
    // Each of these is a bijection of the lane: two tensors that differ in one word have different
    // hashes.
    for (int i = 0; i < kLanes; ++i) lanes[i] = std::rotl((lanes[i] ^ words[i]) * kOdd, 29);
  }
  uint64_t hash = StableHash(seed, absl::string_view(data + at, static_cast<size_t>(bytes - at)));
  for (const uint64_t lane : lanes) hash = StableHash(hash, lane);
  return hash;
}

class TensorHash {
 public:
  TensorHash(Communicator& comm, StreamRef stream) : comm_(comm), stream_(stream) {}

  absl::StatusOr<uint64_t> Of(const TensorView& view) {
    uint64_t hash = StableHash(0, static_cast<uint64_t>(view.bytes()));
    for (int64_t begin = 0; begin < view.bytes(); begin += kPiece) {
      const int64_t bytes = std::min(kPiece, view.bytes() - begin);
      const char* piece = static_cast<const char*>(view.data) + begin;
      if (!view.device.is_cpu()) {
        EK_ASSIGN_OR_RETURN(piece, OnHost(piece, bytes, view.device));
      }
      hash = HashOfBytes(hash, piece, bytes);
    }
    return hash;
  }

 private:
  absl::StatusOr<const char*> OnHost(const char* piece, int64_t bytes, Device device) {
    DeviceRuntime& runtime = *comm_.runtime();
    if (stream_.handle == nullptr) {
      EK_ASSIGN_OR_RETURN(own_, runtime.CreateStream(device));
      stream_ = own_.ref();
    }
    if (memory_.bytes == 0) {
      EK_ASSIGN_OR_RETURN(memory_, runtime.AllocatePinned(kPiece));
    }
    EK_RETURN_IF_ERROR(runtime.Copy(memory_.data.get(), piece, bytes, stream_));
    EK_RETURN_IF_ERROR(runtime.Synchronize(stream_, SteadyNow() + comm_.timeout()));
    return static_cast<const char*>(memory_.data.get());
  }

  Communicator& comm_;
  StreamRef stream_;
  Stream own_;
  Memory memory_;
};

// Sets those of `ranks` whose value differs from the most frequent one; all if two are.
void NameRanks(const std::vector<uint64_t>& hashes, absl::Span<const int> ranks,
               Divergence& divergence) {
  std::map<uint64_t, int> count;
  for (const uint64_t hash : hashes) ++count[hash];
  uint64_t usual = hashes[0];
  for (const uint64_t hash : hashes) {
    if (count[hash] > count[usual]) usual = hash;
  }
  for (const auto& [hash, number] : count) {
    if (hash != usual && number == count[usual]) divergence.is_split = true;
  }
  for (size_t i = 0; i < hashes.size(); ++i) {
    if (divergence.is_split || hashes[i] != usual) divergence.ranks.push_back(ranks[i]);
  }
}

std::vector<int> AllRanksOf(const Communicator& comm) {
  std::vector<int> ranks(comm.world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

std::string ToString(const Divergence& divergence) {
  std::string text = absl::StrCat("\"", divergence.tensor, "\" (tensor ", divergence.index, ")");
  if (divergence.is_split) {
    const absl::string_view between = divergence.ranks.size() == 2 ? " and " : ", ";
    absl::StrAppend(&text, ": ranks ", absl::StrJoin(divergence.ranks, between), " differ");
  } else {
    absl::StrAppend(&text, " differs on ", RankList(divergence.ranks));
  }
  if (divergence.tensors > 1)
    absl::StrAppend(&text, ", and ", divergence.tensors - 1, " more tensors differ");
  return text;
}

uint64_t HashOf(const TensorView& tensor) {
  return HashOfBytes(0, static_cast<const char*>(tensor.data), tensor.bytes());
}

absl::StatusOr<uint64_t> HashOf(absl::Span<const NamedView> tensors, Communicator& comm,
                                StreamRef stream) {
  TensorHash hash(comm, stream);
  uint64_t all = tensors.size();
  for (const NamedView& tensor : tensors) {
    EK_ASSIGN_OR_RETURN(const uint64_t one, hash.Of(tensor.view));
    all = StableHash(all, one);
  }
  return all;
}

std::vector<NamedView> NamedValuesOf(const ParameterSet& params) {
  std::vector<NamedView> values;
  for (int i = 0; i < params.size(); ++i)
    values.push_back({params[i].name, params.is_ignored(i) ? TensorView() : params[i].value});
  return values;
}

absl::StatusOr<std::optional<Divergence>> FindDivergence(absl::Span<const NamedView> tensors,
                                                         Communicator& comm,
                                                         const DivergenceOptions& options) {
  absl::Status status = Check(tensors, comm.device(), options);
  const int64_t count = std::max<int64_t>(options.parts, 1), part = options.part % count;
  const std::vector<int> ranks = options.among.empty() ? AllRanksOf(comm) : options.among;
  const bool is_compared = std::ranges::find(ranks, comm.rank()) != ranks.end();
  TensorHash hash(comm, options.stream);
  std::vector<int> looked_at;
  std::vector<uint64_t> own;
  uint64_t names = StableHash(tensors.size(), static_cast<uint64_t>(count)), values = 0;
  for (size_t i = 0; i < tensors.size() && status.ok(); ++i) {
    names = StableHash(names, tensors[i].name);
    if (static_cast<int64_t>(i) % count != part) continue;
    looked_at.push_back(static_cast<int>(i));
    if (!is_compared) continue;
    const absl::StatusOr<uint64_t> one = hash.Of(tensors[i].view);
    status = one.status();
    if (!one.ok()) break;
    own.push_back(*one);
    values = StableHash(values, *one);
  }

  const std::string mine = internal::ByteWriter().U64(names).I64(part).U64(values).Take();
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                      AgreeOn(comm, options.topic, status, mine));
  for (const std::string& part : parts) {
    if (absl::string_view(part).substr(0, 16) != absl::string_view(parts[0]).substr(0, 16)) {
      return absl::InvalidArgumentError(
          "FindDivergence: the ranks passed different tensors or options");
    }
  }
  if (std::ranges::all_of(ranks, [&](int rank) { return parts[rank] == parts[ranks[0]]; }))
    return std::nullopt;

  internal::ByteWriter writer;
  for (const uint64_t hash : own) writer.U64(hash);
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts hashes,
                      comm.control().Exchange(options.topic, writer.Take(), comm.timeout()));
  std::vector<internal::ByteReader> readers(hashes.begin(), hashes.end());
  std::optional<Divergence> found;
  std::set<int> different;
  for (const int index : looked_at) {
    std::vector<uint64_t> values;
    for (const int rank : ranks) values.push_back(readers[rank].U64());
    Divergence divergence{.tensor = tensors[index].name, .index = index};
    NameRanks(values, ranks, divergence);
    if (divergence.ranks.empty()) continue;
    different.insert(divergence.ranks.begin(), divergence.ranks.end());
    if (found.has_value()) {
      ++found->tensors;
    } else {
      found = std::move(divergence);
    }
  }
  for (const internal::ByteReader& reader : readers)
    EK_RETURN_IF_ERROR(reader.Finish("a rank's hashes"));
  if (found.has_value()) found->any_tensor = {different.begin(), different.end()};
  return found;
}

absl::StatusOr<std::optional<Divergence>> FindDivergence(const ParameterSet& params,
                                                         Communicator& comm,
                                                         const DivergenceOptions& options) {
  DivergenceOptions own = options;
  if (own.stream.handle == nullptr) own.stream = params.stream();
  return FindDivergence(NamedValuesOf(params), comm, own);
}

}  // namespace evenkeel
