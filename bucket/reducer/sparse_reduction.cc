#include "evenkeel/bucket/reducer/sparse_reduction.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/sparse_rows.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// The data that the ranks of one sparse parameter send each other.
struct Gathering {
  int64_t largest = 0;  // Rows of the rank that has most.
  std::vector<int64_t> rows, all_rows;
  std::vector<std::byte> values, all_values;
};

// Returns the rows of all ranks, in the order of ranks, without their padding. `rows_of`: the
// number of a rank's rows.
SparseRows RowsOfAllRanks(const Gathering& gathering, int64_t row_bytes, int world_size,
                          absl::FunctionRef<int64_t(int rank)> rows_of) {
  SparseRows all;
  for (int rank = 0; rank < world_size && gathering.largest > 0; ++rank) {
    const int64_t rows = rows_of(rank), begin = rank * gathering.largest;
    all.rows.insert(all.rows.end(), gathering.all_rows.begin() + begin,
                    gathering.all_rows.begin() + begin + rows);
    all.values.insert(all.values.end(), gathering.all_values.begin() + begin * row_bytes,
                      gathering.all_values.begin() + (begin + rows) * row_bytes);
  }
  return all;
}

}  // namespace

std::vector<Collective> SparseCollectives(const ParameterSet& params,
                                          absl::Span<const int> sparse) {
  if (sparse.empty()) return {};
  const int count = static_cast<int>(sparse.size());
  std::vector<Collective> collectives = {{.kind = CollectiveKind::kAllGather,
                                          .dtype = DType::kInt64,
                                          .count = count,
                                          .role = Role::kState,
                                          .joined = Contribution::kOwned}};
  for (int s = 0; s < count; ++s) {
    for (const DType dtype : {DType::kInt64, params[sparse[s]].value.dtype}) {
      collectives.push_back({.kind = CollectiveKind::kAllGather,
                             .dtype = dtype,
                             .role = Role::kState,
                             .index = s,
                             .index_count = count,
                             .joined = Contribution::kOwned});
    }
  }
  return collectives;
}

absl::Status ReduceSparse(ParameterSet& params, absl::Span<const int> sparse, Channel& channel,
                          int world_size, double scale) {
  if (sparse.empty()) return absl::OkStatus();
  const std::vector<Collective> collectives = SparseCollectives(params, sparse);
  const size_t count = sparse.size();
  std::vector<SparseRows> mine(count);
  std::vector<int64_t> counts(count), all_counts(count * world_size);
  for (size_t s = 0; s < count; ++s) {
    const int param = sparse[s];
    if (params.grad_state(param) == GradState::kNone) continue;
    mine[s] = params.sparse_grad(param);
    counts[s] = static_cast<int64_t>(mine[s].rows.size());
  }
  EK_RETURN_IF_ERROR(channel
                         .Issue(collectives[0], {TensorView(absl::MakeSpan(counts))},
                                {TensorView(absl::MakeSpan(all_counts))})
                         .Wait());

  std::vector<Gathering> gatherings(count);
  std::vector<Work> works;
  for (size_t s = 0; s < count; ++s) {
    Gathering& gathering = gatherings[s];
    for (int rank = 0; rank < world_size; ++rank) {
      const int64_t rows = all_counts[rank * count + s];
      if (rows < 0) return absl::InternalError(absl::StrCat("rank ", rank, " has ", rows, " rows"));
      gathering.largest = std::max(gathering.largest, rows);
    }
    if (gathering.largest == 0) continue;  // On all ranks alike.
    const Parameter& param = params[sparse[s]];
    const int64_t elements = gathering.largest * params.row_size(sparse[s]);
    const int64_t bytes = elements * SizeOf(param.value.dtype);
    gathering.rows = std::move(mine[s].rows);
    gathering.rows.resize(gathering.largest);
    gathering.all_rows.resize(gathering.largest * world_size);
    gathering.values = std::move(mine[s].values);
    gathering.values.resize(bytes);
    gathering.all_values.resize(bytes * world_size);
    Collective row_numbers = collectives[1 + 2 * s], values = collectives[2 + 2 * s];
    row_numbers.count = gathering.largest;
    values.count = elements;
    works.push_back(channel.Issue(row_numbers, {TensorView(absl::MakeSpan(gathering.rows))},
                                  {TensorView(absl::MakeSpan(gathering.all_rows))}));
    works.push_back(channel.Issue(
        values, {TensorView(gathering.values.data(), elements, param.value.dtype)},
        {TensorView(gathering.all_values.data(), elements * world_size, param.value.dtype)}));
  }
  works.push_back(channel.CompareIssued());
  absl::Status status;
  for (const Work& work : works)
    status.Update(work.Wait());  // All of them: they use the memory here.
  EK_RETURN_IF_ERROR(status);

  for (size_t s = 0; s < count; ++s) {
    const int param = sparse[s];
    const int64_t row_size = params.row_size(param);
    const DType dtype = params[param].value.dtype;
    const SparseRows all = RowsOfAllRanks(gatherings[s], row_size * SizeOf(dtype), world_size,
                                          [&](int rank) { return all_counts[rank * count + s]; });
    const bool is_none = all.rows.empty();
    params.SetSparseRows(param, CoalesceRows(dtype, all, row_size, scale));
    params.SetGradState(param, is_none ? GradState::kNone : GradState::kReduced);
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
