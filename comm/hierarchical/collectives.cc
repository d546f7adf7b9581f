#include "evenkeel/comm/hierarchical/collectives.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/hierarchical/thresholds.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/status.h"

#if __GNUC__ >= 14  // It takes empty lists in a Step for uninitialized.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace evenkeel::internal {
namespace {

// A step that is not through so long after the operation's deadline has been forgotten by its
// transport. Until then the transports and the communicator, which know more, say what was waited
// for.
constexpr absl::Duration kGrace = absl::Seconds(2);

// Where the result is a sum, a scale belongs to what the first step adds up, so that float16 stays
// in range.
bool ScalesSums(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAverage; }

DType BitsOf(DType dtype) {
  switch (SizeOf(dtype)) {
    case 1:
      return DType::kInt8;
    case 2:
      return DType::kInt16;
    case 4:
      return DType::kInt32;
    default:
      return DType::kInt64;
  }
}

std::vector<TensorList> ChunksOf(const Operation& operation) {
  const int64_t per_chunk = kHierarchicalChunkBytes / SizeOf(operation.what.dtype);
  if (operation.what.count <= per_chunk) return {operation.out};
  std::vector<TensorList> chunks;
  for (int64_t begin = 0; begin < operation.what.count; begin += per_chunk) {
    chunks.push_back(
        Range(operation.out, begin, std::min(per_chunk, operation.what.count - begin)));
  }
  return chunks;
}

}  // namespace

uint64_t HashOfWhole(const Operation& operation) {
  const auto sequence = static_cast<uint64_t>(operation.sequence);
  return std::max<uint64_t>(1, StableHash(sequence, HashOfCommonPart(operation)));
}

HierarchicalCollectives::HierarchicalCollectives(const HostMap& map, int rank,
                                                 const HierarchicalTransports& transports,
                                                 uint64_t channel,
                                                 std::function<void(const absl::Status&)> abort)
    : map_(map),
      rank_(rank),
      host_(map.host_of(rank)),
      channel_(channel),
      abort_(std::move(abort)),
      inside_{.backend = transports.inside.get()},
      between_{.backend = transports.between.get()},
      all_{.backend = transports.all.get()} {}

absl::Status HierarchicalCollectives::Run(const Operation& operation) {
  const CollectiveKind kind = operation.what.kind;
  if (operation.what.count == 0 && kind != CollectiveKind::kBarrier && !IsUneven(kind))
    return absl::OkStatus();
  const absl::Status status =
      Annotate(RunKind(operation), RankNames().Place(rank_, operation.sequence, operation.what));
  if (!status.ok()) {
    // Steps that were started ahead touch the buffers until they have ended too.
    abort_(status);
    for (const Started& started : open_) started->Wait().IgnoreError();
  }
  open_.clear();
  return status;
}

absl::Status HierarchicalCollectives::RunKind(const Operation& operation) {
  switch (operation.what.kind) {
    case CollectiveKind::kAllReduce:
      return AllReduce(operation);
    case CollectiveKind::kReduce:
      return Reduce(operation);
    case CollectiveKind::kBroadcast:
      return Broadcast(operation);
    case CollectiveKind::kAllGather:
      return AllGather(operation);
    case CollectiveKind::kReduceScatter:
      return ReduceScatter(operation);
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kAllToAllV:
      return AllToAll(operation);
    case CollectiveKind::kAllGatherV:
      return AllGatherV(operation);
    case CollectiveKind::kBarrier:
      return Barrier(operation);
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      break;
  }
  return absl::InternalError(absl::StrCat(ToString(operation.what), " has no steps"));
}

// Inside, chunk i + 1 is reduced before chunk i - 1 is spread, on all ranks, so neither waits for
// the link, and only the leader for it.
absl::Status HierarchicalCollectives::AllReduce(const Operation& operation) {
  const std::vector<TensorList> chunks = ChunksOf(operation);
  const size_t n = chunks.size();
  std::vector<Started> reduced(n), crossed(n), spread;
  const auto reduce = [&](size_t i) {
    if (is_shared())
      reduced[i] = Start(inside_, operation, ReduceInside(operation, chunks[i], chunks[i]));
  };
  const auto cross = [&](size_t i) -> absl::Status {
    if (!leads()) return absl::OkStatus();
    if (is_shared()) {
      EK_RETURN_IF_ERROR(reduced[i]->Wait());
    } else {
      ContributeAlone(operation, chunks[i]);
    }
    crossed[i] = Start(between_, operation,
                       {.kind = CollectiveKind::kAllReduce,
                        .in = chunks[i],
                        .out = chunks[i],
                        .scale = ScaleBetween(operation)});
    return absl::OkStatus();
  };
  const auto spread_out = [&](size_t i) -> absl::Status {
    if (leads()) EK_RETURN_IF_ERROR(crossed[i]->Wait());
    if (!is_shared()) return absl::OkStatus();
    spread.push_back(
        Start(inside_, operation,
              {.kind = CollectiveKind::kBroadcast, .root = 0, .in = chunks[i], .out = chunks[i]}));
    return absl::OkStatus();
  };
  reduce(0);
  for (size_t i = 0; i < n; ++i) {
    if (i + 1 < n) reduce(i + 1);
    EK_RETURN_IF_ERROR(cross(i));
    if (i > 0) EK_RETURN_IF_ERROR(spread_out(i - 1));
  }
  EK_RETURN_IF_ERROR(spread_out(n - 1));
  for (size_t i = 0; is_shared() && !leads() && i < n; ++i) EK_RETURN_IF_ERROR(reduced[i]->Wait());
  for (const Started& last : spread) EK_RETURN_IF_ERROR(last->Wait());
  return absl::OkStatus();
}

absl::Status HierarchicalCollectives::Reduce(const Operation& operation) {
  const int root = operation.what.root;
  if (is_shared()) {
    EK_RETURN_IF_ERROR(
        Do(inside_, operation, ReduceInside(operation, operation.in, operation.out)));
  } else {
    ContributeAlone(operation, operation.out);
  }
  if (leads()) {
    EK_RETURN_IF_ERROR(Do(between_, operation,
                          {.kind = CollectiveKind::kReduce,
                           .root = map_.host_of(root),
                           .in = operation.out,
                           .out = operation.out,
                           .scale = ScaleBetween(operation)}));
  }
  if (map_.host_of(root) != host_) return absl::OkStatus();
  if (leads() == (rank_ == root))
    return absl::OkStatus();  // It is there, or neither from nor for this rank.
  if (!leads()) {
    return Do(inside_, operation, {.kind = CollectiveKind::kRecv, .root = 0, .out = operation.out});
  }
  return Do(inside_, operation,
            {.kind = CollectiveKind::kSend, .root = map_.place_of(root), .in = operation.out});
}

absl::Status HierarchicalCollectives::Broadcast(const Operation& operation) {
  const int root = operation.what.root;
  const bool is_source = map_.host_of(root) == host_;
  const std::vector<TensorList> chunks = ChunksOf(operation);
  std::vector<Started> first, second;
  const auto inside = [&](const TensorList& chunk) {
    return Start(inside_, operation,
                 {.kind = CollectiveKind::kBroadcast,
                  .root = is_source ? map_.place_of(root) : 0,
                  .in = chunk,
                  .out = chunk});
  };
  const auto between = [&](const TensorList& chunk) {
    return Start(between_, operation,
                 {.kind = CollectiveKind::kBroadcast,
                  .root = map_.host_of(root),
                  .in = chunk,
                  .out = chunk});
  };
  // On the source's host the link is the second step, elsewhere the first.
  const bool has_first = is_source ? is_shared() : leads();
  const bool has_second = is_source ? leads() : is_shared();
  if (has_first) {
    for (const TensorList& chunk : chunks)
      first.push_back(is_source ? inside(chunk) : between(chunk));
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (has_first) EK_RETURN_IF_ERROR(first[i]->Wait());
    if (has_second) second.push_back(is_source ? between(chunks[i]) : inside(chunks[i]));
  }
  for (const Started& last : second) EK_RETURN_IF_ERROR(last->Wait());
  return absl::OkStatus();
}

absl::Status HierarchicalCollectives::AllGather(const Operation& operation) {
  const int64_t count = operation.what.count;
  const int64_t element = SizeOf(operation.what.dtype);
  const int64_t fill =
      (map_.largest() * int64_t{map_.hosts()} - map_.ranks()) * count;  // For all hosts.
  const int64_t own_fill = (map_.largest() - static_cast<int64_t>(peers().size())) * count;
  const bool sets_aside = !is_shared() && Overlap(operation.in, operation.out);
  EK_ASSIGN_OR_RETURN(char* const scratch,
                      Scratch(std::max(leads() ? (fill + own_fill) * element : 0,
                                       sets_aside ? count * element : 0)));

  TensorList own = SharesOf(host_, operation.out, count);
  if (is_shared()) {
    EK_RETURN_IF_ERROR(
        Do(inside_, operation,
           {.kind = CollectiveKind::kAllGather, .count = count, .in = operation.in, .out = own}));
  } else if (sets_aside) {
    const TensorList aside = LaidOutLike(operation.in, scratch);
    Copy(operation.in, aside);
    Copy(aside, own);
  } else {
    Copy(operation.in, own);
  }

  if (leads()) {
    char* at = scratch;
    const auto fill_up = [&](int host, TensorList& block) {
      const int64_t missing =
          (map_.largest() - static_cast<int64_t>(map_.ranks_of(host).size())) * count;
      if (missing > 0) block.push_back(TensorView(at, missing, operation.what.dtype));
      at += missing * element;
    };
    TensorList blocks;
    for (int host = 0; host < map_.hosts(); ++host) {
      for (int rank : map_.ranks_of(host)) AppendRange(operation.out, rank * count, count, blocks);
      fill_up(host, blocks);
    }
    TensorList mine = own;
    fill_up(host_, mine);
    EK_RETURN_IF_ERROR(Do(between_, operation,
                          {.kind = CollectiveKind::kAllGather,
                           .count = map_.largest() * count,
                           .in = mine,
                           .out = blocks}));
  }
  if (!is_shared()) return absl::OkStatus();
  TensorList others;
  for (int rank = 0; rank < map_.ranks(); ++rank) {
    if (map_.host_of(rank) != host_) AppendRange(operation.out, rank * count, count, others);
  }
  return Do(inside_, operation,
            {.kind = CollectiveKind::kBroadcast, .root = 0, .in = others, .out = others});
}

absl::Status HierarchicalCollectives::AllGatherV(const Operation& operation) {
  const TensorList& out = operation.out;
  TensorList others;
  for (int rank = 0; rank < map_.ranks(); ++rank) {
    if (map_.host_of(rank) != host_) others.push_back(out[rank]);
  }
  if (is_shared()) {
    TensorList own;
    for (int rank : peers()) own.push_back(out[rank]);
    EK_RETURN_IF_ERROR(
        Do(inside_, operation,
           {.kind = CollectiveKind::kAllGatherV, .in = operation.in, .out = std::move(own)}));
  }
  std::vector<Started> crossed;
  for (size_t place = 0; leads() && place < static_cast<size_t>(map_.largest()); ++place) {
    TensorList blocks;  // By host.
    for (int host = 0; host < map_.hosts(); ++host) {
      const std::vector<int>& ranks = map_.ranks_of(host);
      blocks.push_back(place < ranks.size() ? out[ranks[place]]
                                            : TensorView(nullptr, 0, operation.what.dtype));
    }
    const TensorList mine = is_shared() || place > 0 ? TensorList{blocks[host_]} : operation.in;
    crossed.push_back(
        Start(between_, operation,
              {.kind = CollectiveKind::kAllGatherV, .in = mine, .out = std::move(blocks)}));
  }
  for (const Started& step : crossed) EK_RETURN_IF_ERROR(step->Wait());
  if (!is_shared()) return absl::OkStatus();
  return Do(inside_, operation,
            {.kind = CollectiveKind::kBroadcast, .root = 0, .in = others, .out = others});
}

absl::Status HierarchicalCollectives::ReduceScatter(const Operation& operation) {
  const int64_t count = operation.what.count;
  const int64_t element = SizeOf(operation.what.dtype);
  const int64_t block =
      map_.largest() * count;  // Per host; those with fewer ranks have something left over.
  EK_ASSIGN_OR_RETURN(char* const scratch, Scratch(leads() ? map_.hosts() * block * element : 0));

  TensorList in, sums;  // By host.
  for (int host = 0; host < map_.hosts(); ++host) {
    const TensorList shares = SharesOf(host, operation.in, count);
    for (const TensorView& view : shares) in.push_back(view);
    if (!leads()) continue;
    for (const TensorView& view : LaidOutLike(shares, scratch + host * block * element))
      sums.push_back(view);
  }
  if (is_shared()) {
    EK_RETURN_IF_ERROR(Do(inside_, operation, ReduceInside(operation, in, leads() ? sums : in)));
  } else {
    Copy(in, sums);
    ContributeAlone(operation, sums);
  }

  const TensorView whole(scratch, map_.hosts() * block, operation.what.dtype);
  if (leads()) {
    const TensorView mine = whole.Slice(host_ * block, block);
    EK_RETURN_IF_ERROR(Do(between_, operation,
                          {.kind = CollectiveKind::kReduceScatter,
                           .count = block,
                           .in = {whole},
                           .out = {mine},
                           .scale = ScaleBetween(operation)}));
  }
  const int64_t shares = static_cast<int64_t>(peers().size()) * count;
  const TensorList mine =
      leads() ? TensorList{whole.Slice(host_ * block, shares)} : Range(operation.in, 0, shares);
  if (!is_shared()) {
    Copy(mine, operation.out);
    return absl::OkStatus();
  }
  // One rank contributes, so this hands out what it has.
  return Do(inside_, operation,
            {.kind = CollectiveKind::kReduceScatter,
             .count = count,
             .in = mine,
             .out = operation.out,
             .contributes = leads(),
             .as_bits = true});
}

absl::Status HierarchicalCollectives::AllToAll(const Operation& operation) {
  return Do(all_, operation,
            {.kind = operation.what.kind,
             .count = operation.what.count,
             .in = operation.in,
             .out = operation.out});
}

absl::Status HierarchicalCollectives::Barrier(const Operation& operation) {
  if (is_shared()) EK_RETURN_IF_ERROR(Do(inside_, operation, {}));
  if (leads()) EK_RETURN_IF_ERROR(Do(between_, operation, {}));
  if (is_shared()) EK_RETURN_IF_ERROR(Do(inside_, operation, {}));
  return absl::OkStatus();
}

HierarchicalCollectives::Started HierarchicalCollectives::Start(Line& line, const Operation& whole,
                                                                Step step) {
  const bool is_message = IsPair(step.kind);
  Operation operation;
  operation.what = whole.what;
  operation.what.kind = step.kind;
  operation.what.op = step.as_bits ? ReduceOp::kBitOr : whole.what.op;
  if (step.as_bits) operation.what.dtype = BitsOf(whole.what.dtype);
  operation.what.root = step.root;
  operation.what.count = step.count;
  if (step.count == 0 && !IsUneven(step.kind))
    operation.what.count = CountOf(step.out.empty() ? step.in : step.out);
  operation.channel = channel_;
  operation.sequence = is_message ? line.messages[step.root]++ : line.sequence++;
  operation.in = As(operation.what.dtype, std::move(step.in));
  operation.out = As(operation.what.dtype, std::move(step.out));
  operation.scale = step.scale;
  operation.contributes = step.contributes;
  operation.step_of = HashOfWhole(whole);
  operation.deadline = whole.deadline;

  auto work = std::make_shared<WorkState>(whole.deadline + kGrace, [this, what = whole.what,
                                                                    sequence = whole.sequence] {
    abort_(RankNames().AtOperation(absl::DeadlineExceededError("the operation missed its deadline"),
                                   rank_, sequence, what));
  });
  open_.push_back(work);
  line.backend->Start(std::move(operation), work);
  return work;
}

HierarchicalCollectives::Step HierarchicalCollectives::ReduceInside(const Operation& whole,
                                                                    TensorList in,
                                                                    TensorList out) const {
  return {.kind = CollectiveKind::kReduce,
          .root = 0,
          .in = std::move(in),
          .out = std::move(out),
          .scale = ScalesSums(whole.what.op) ? whole.scale : 1.0,
          .contributes = whole.contributes};
}

double HierarchicalCollectives::ScaleBetween(const Operation& whole) const {
  return ScalesSums(whole.what.op) ? 1.0 : whole.scale;
}

void HierarchicalCollectives::ContributeAlone(const Operation& whole,
                                              const TensorList& data) const {
  const Collective& what = whole.what;
  for (const TensorView& view : data) {
    if (!whole.contributes) {
      FillIdentity(what.op, what.dtype, view.data, view.count);
    } else if (ScalesSums(what.op)) {
      Scale(what.dtype, view.data, view.count, whole.scale);
    }
  }
}

TensorList HierarchicalCollectives::SharesOf(int host, const TensorList& views,
                                             int64_t count) const {
  TensorList shares;
  for (int rank : map_.ranks_of(host)) AppendRange(views, rank * count, count, shares);
  return shares;
}

absl::StatusOr<char*> HierarchicalCollectives::Scratch(int64_t bytes) {
  if (bytes > scratch_.bytes) {
    scratch_ = Memory();
    EK_ASSIGN_OR_RETURN(scratch_, (is_shared() ? inside_ : all_).backend->Allocate(bytes));
  }
  return static_cast<char*>(scratch_.data.get());
}

}  // namespace evenkeel::internal
