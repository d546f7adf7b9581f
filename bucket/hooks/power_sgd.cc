#include "evenkeel/bucket/hooks/power_sgd.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

#if __GNUC__ >= 14  // It takes empty lists in RoundBuffers for uninitialized.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// While a bucket is under way its `data` holds, for each matrix, in round 0 M (gradient plus
// error), then M less what this rank sent of it, which OnReduced() makes the error before the
// group's gradient takes its place. So no third copy of the gradients exists, and a step that fails
// in between leaves errors and Q as they were.

namespace evenkeel {

using internal::AddProduct;
using internal::FillRandom;
using internal::IsFinite;
using internal::MatrixView;

namespace {

constexpr uint32_t kStateFormat = 1;

std::string BytesOf(std::span<const float> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

std::vector<float> FloatsOf(absl::string_view bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

}  // namespace

MatrixShape MatrixOf(std::span<const int64_t> dimensions) {
  if (dimensions.size() < 2) return {};
  MatrixShape shape{.rows = dimensions[0], .cols = 1};
  for (int64_t dimension : dimensions.subspan(1)) shape.cols *= dimension;
  return shape;
}

PowerSgd::PowerSgd(PowerSgdOptions options)
    : options_(std::move(options)), slots_(options_.shapes.size()) {}

int64_t PowerSgd::RankOf(int param) const {
  const MatrixShape& shape = options_.shapes[param];
  const int64_t rank = std::min<int64_t>({options_.rank, shape.rows, shape.cols});
  const double sent = static_cast<double>(rank) * static_cast<double>(shape.rows + shape.cols);
  const double whole = static_cast<double>(shape.rows) * static_cast<double>(shape.cols);
  return sent * options_.min_compression_rate <= whole ? rank : 0;
}

PowerSgd::Layout PowerSgd::LayOut(const BucketInfo& bucket) const {
  Layout layout;
  if (bucket.data.dtype != DType::kFloat32 || !Compresses()) return layout;
  for (size_t i = 0; i < bucket.params.size(); ++i) {
    const int param = bucket.params[i];
    const MatrixShape& shape = options_.shapes[param];
    const int64_t end = i + 1 < bucket.params.size() ? bucket.offsets[i + 1] : bucket.data.count;
    Place place{.count = end - bucket.offsets[i],
                .rank = RankOf(param),
                .first = layout.first_count,
                .second = layout.second_count};
    if (place.rank > 0) {
      place.matrix = {static_cast<float*>(bucket.data.data) + bucket.offsets[i], shape.rows,
                      shape.cols};
      layout.first_count += place.rank * shape.rows;
      layout.second_count += place.rank * shape.cols;
      layout.has_matrices = true;
    } else {
      layout.first_count += place.count;
    }
    layout.places.push_back(place);
  }
  layout.first_count += bucket.used.count;
  return layout;
}

std::vector<Collective> PowerSgd::CollectivesFor(const BucketInfo& bucket) const {
  const Layout layout = LayOut(bucket);
  const auto all_reduce = [](DType dtype, int64_t count) {
    return Collective{.kind = CollectiveKind::kAllReduce, .dtype = dtype, .count = count};
  };
  if (!Compresses()) return {all_reduce(bucket.data.dtype, bucket.wire.count)};
  if (!layout.has_matrices) {
    return {all_reduce(bucket.data.dtype, bucket.wire.count), {.kind = CollectiveKind::kBarrier}};
  }
  return {all_reduce(DType::kFloat32, layout.first_count),
          all_reduce(DType::kFloat32, layout.second_count)};
}

absl::Status PowerSgd::OnPlan(absl::Span<const BucketInfo> buckets) {
  if (options_.rank < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("PowerSgdOptions::rank is ", options_.rank, ", but must be at least 1"));
  for (const BucketInfo& bucket : buckets) {
    if (!bucket.data.device.is_cpu()) {
      return absl::UnimplementedError(
          absl::StrCat("PowerSGD cannot compress ", ToString(bucket.data)));
    }
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const int param = bucket.params[i];
      if (param >= static_cast<int>(options_.shapes.size())) {
        return absl::InvalidArgumentError(absl::StrCat("PowerSGD: parameter ", param,
                                                       " is out of range for ",
                                                       options_.shapes.size(), " shapes"));
      }
      const MatrixShape& shape = options_.shapes[param];
      const int64_t end = i + 1 < bucket.params.size() ? bucket.offsets[i + 1] : bucket.data.count;
      if (shape.cols == 0 || shape.rows * shape.cols == end - bucket.offsets[i]) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("PowerSGD: parameter ", param, " has ", end - bucket.offsets[i],
                       " elements, its shape is [", shape.rows, ", ", shape.cols, "]"));
    }
  }
  buckets_.clear();
  buckets_.resize(buckets.size());
  return absl::OkStatus();
}

void PowerSgd::OnGroup(Communicator& /*comm*/) {
  if (std::exchange(has_group_, true)) {  // State loaded before the first group stays valid.
    slots_.assign(slots_.size(), Slot());
    steps_ = 0;
  }
}

void PowerSgd::DrawColumn(int param, int64_t column) {
  Slot& slot = slots_[param];
  const int64_t cols = options_.shapes[param].cols;
  const uint64_t seed =
      StableHash(StableHash(options_.seed, static_cast<uint64_t>(param)), slot.draws++);
  FillRandom(std::span(slot.q).subspan(column * cols, cols), seed);
}

absl::StatusOr<RoundBuffers> PowerSgd::BeginRound(const BucketInfo& bucket, int round,
                                                  const ReductionStep& step) {
  Bucket& own = buckets_[bucket.index];
  if (round == 0) {
    own.layout = LayOut(bucket);
    own.first.resize(own.layout.first_count);
    own.second.resize(own.layout.second_count);
  }
  if (!own.layout.has_matrices) {
    RoundBuffers nothing;
    if (round > 0) return nothing;
    return RoundBuffers{.in = {bucket.wire}, .out = {bucket.wire}, .scale = step.scale};
  }
  round == 0 ? SendFirst(bucket, own, step) : SendSecond(bucket, own, step);
  const TensorView sent(absl::MakeSpan(round == 0 ? own.first : own.second));
  return RoundBuffers{.in = {sent}, .out = {sent}, .scale = step.scale};
}

void PowerSgd::SendFirst(const BucketInfo& bucket, Bucket& own, const ReductionStep& step) {
  const std::span<float> data = bucket.data.as<float>();
  for (size_t i = 0; i < own.layout.places.size(); ++i) {
    Place& place = own.layout.places[i];
    const MatrixView& m = place.matrix;
    Slot& slot = slots_[bucket.params[i]];
    if (place.rank > 0 && slot.q.empty()) {
      slot.q.resize(place.rank * m.cols);
      for (int64_t k = 0; k < place.rank; ++k) DrawColumn(bucket.params[i], k);
    }
    if (!step.contributes) continue;
    if (place.rank == 0) {
      std::copy_n(data.begin() + bucket.offsets[i], place.count, own.first.begin() + place.first);
      continue;
    }
    if (bucket.used.as<float>()[i] != 0 && !slot.error.empty()) {
      for (int64_t e = 0; e < m.count(); ++e) m.data[e] += slot.error[e];
    }
    TimesColumns(m, slot.q.data(), place.rank, own.first.data() + place.first);
  }
  const std::span<const float> used = bucket.used.as<float>();
  std::copy(used.begin(), used.end(), own.first.end() - used.size());
}

void PowerSgd::SendSecond(const BucketInfo& bucket, Bucket& own, const ReductionStep& step) {
  const std::span<float> data = bucket.data.as<float>();
  const std::span<float> used = bucket.used.as<float>();
  const std::span<const float> flags = std::span(own.first).last(used.size());
  for (size_t i = 0; i < own.layout.places.size(); ++i) {
    Place& place = own.layout.places[i];
    const MatrixView& m = place.matrix;
    float* const p = own.first.data() + place.first;
    if (place.rank == 0) {
      std::copy_n(p, place.count, data.begin() + bucket.offsets[i]);
      continue;
    }
    place.is_finite = IsFinite({p, static_cast<size_t>(place.rank * m.rows)});
    if (place.is_finite) internal::Orthonormalize(p, m.rows, place.rank, options_.epsilon);
    if (!step.contributes || !place.is_finite) continue;
    float* const q = own.second.data() + place.second;
    TransposedTimesColumns(m, p, place.rank, q);
    if (used[i] == 0) continue;  // This rank had none: its error stays.
    AddProduct(p, q, place.rank, -1.0f, m);
    place.has_rest = options_.use_error_feedback;
  }
  std::copy(flags.begin(), flags.end(), used.begin());
}

absl::StatusOr<GradFate> PowerSgd::OnReduced(const BucketInfo& bucket,
                                             const ReductionStep& /*step*/) {
  Bucket& own = buckets_[bucket.index];
  for (size_t i = 0; i < own.layout.places.size(); ++i) {
    if (own.layout.places[i].rank > 0) Finish(bucket, own, i);
  }
  return GradFate::kReduced;
}

absl::Status PowerSgd::OnStepEnd() {
  ++steps_;
  return absl::OkStatus();
}

void PowerSgd::Finish(const BucketInfo& bucket, Bucket& own, size_t index) {
  const Place& place = own.layout.places[index];
  const MatrixView& m = place.matrix;
  Slot& slot = slots_[bucket.params[index]];
  if (bucket.used.as<float>()[index] == 0)
    return;  // None on any rank: the zeros that are there will do.
  const std::span<const float> q = std::span(own.second).subspan(place.second, place.rank * m.cols);
  if (!place.is_finite || !IsFinite(q)) {
    std::fill_n(m.data, m.count(), std::numeric_limits<float>::quiet_NaN());
    return;
  }
  if (place.has_rest) slot.error.assign(m.data, m.data + m.count());
  std::fill_n(m.data, m.count(), 0.0f);
  AddProduct(own.first.data() + place.first, q.data(), place.rank, 1.0f, m);
  slot.q.assign(q.begin(), q.end());
  for (int64_t k = 0; k < place.rank; ++k) {
    const bool lives = internal::Normalize(std::span(slot.q).subspan(k * m.cols, m.cols));
    if (!lives || !options_.warm_start) DrawColumn(bucket.params[index], k);
  }
}

uint64_t PowerSgd::SharedHash() const {
  uint64_t hash = static_cast<uint64_t>(steps_);
  for (const Slot& slot : slots_) hash = StableHash(StableHash(hash, slot.draws), BytesOf(slot.q));
  return hash;
}

std::string PowerSgd::Save() const {
  internal::ByteWriter writer;
  writer.U32(kStateFormat).I32(options_.rank).I64(steps_).U32(static_cast<uint32_t>(slots_.size()));
  for (const Slot& slot : slots_)
    writer.U64(slot.draws).Bytes(BytesOf(slot.q)).Bytes(BytesOf(slot.error));
  return writer.Take();
}

absl::Status PowerSgd::Load(absl::string_view state) {
  internal::ByteReader reader(state);
  const uint32_t format = reader.U32();
  const int32_t rank = reader.I32();
  const int64_t steps = reader.I64();
  const uint32_t count = reader.U32();
  if (reader.ok() &&
      (format != kStateFormat || rank != options_.rank || steps < 0 || count != slots_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("PowerSGD state of format ", format, ", rank ", rank, ", ", count,
                     " parameters; expected format ", kStateFormat, ", rank ", options_.rank, ", ",
                     slots_.size(), " parameters"));
  }
  std::vector<Slot> slots;
  for (uint32_t param = 0; param < count && reader.ok(); ++param) {
    Slot slot{
        .draws = reader.U64(), .q = FloatsOf(reader.Bytes()), .error = FloatsOf(reader.Bytes())};
    const MatrixShape& shape = options_.shapes[param];
    const size_t q_size = RankOf(static_cast<int>(param)) * shape.cols,
                 error_size = shape.rows * shape.cols;
    if (reader.ok() && ((!slot.q.empty() && slot.q.size() != q_size) ||
                        (!slot.error.empty() && slot.error.size() != error_size))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "PowerSGD state of parameter ", param, " has ", slot.q.size(), " elements of Q and ",
          slot.error.size(), " of error; expected ", q_size, " and ", error_size));
    }
    slots.push_back(std::move(slot));
  }
  EK_RETURN_IF_ERROR(reader.Finish("PowerSGD state"));
  slots_ = std::move(slots);
  steps_ = steps;
  return absl::OkStatus();
}

}  // namespace evenkeel
