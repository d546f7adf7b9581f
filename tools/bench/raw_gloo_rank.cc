#include "evenkeel/tools/bench/raw_gloo_rank.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/tools/bench/case.h"
#include "gloo/algorithm.h"
#include "gloo/allgather.h"
#include "gloo/allreduce.h"
#include "gloo/alltoall.h"
#include "gloo/barrier.h"
#include "gloo/broadcast.h"
#include "gloo/math.h"
#include "gloo/reduce.h"
#include "gloo/reduce_scatter.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/file_store.h"
#include "gloo/transport/device.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/unbound_buffer.h"
#include "gloo/types.h"

namespace evenkeel::bench {
namespace {

using gloo::transport::UnboundBuffer;
using Context = std::shared_ptr<gloo::Context>;

constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(60);

// One case's calls, with Gloo's type for its elements.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual void Run(uint32_t tag) = 0;
};

template <typename T>
class TypedPlan : public Plan {
 public:
  TypedPlan(Context context, const Case& what, void* in, void* out)
      : context_(std::move(context)),
        what_(what),
        in_(static_cast<T*>(in)),
        out_(static_cast<T*>(out)),
        in_count_(what.in_bytes() / sizeof(T)),
        out_count_(what.out_bytes() / sizeof(T)) {
    if (what.op == Op::kReduceScatter) {
      const std::vector<int> parts(what.world, static_cast<int>(out_count_));
      reduce_scatter_ = std::make_unique<gloo::ReduceScatterHalvingDoubling<T>>(
          context_, std::vector<T*>{in_}, static_cast<int>(in_count_), parts);
    }
    if (what.op == Op::kSendRecv) {
      sent_ = context_->createUnboundBuffer(in_, what.in_bytes());
      received_ = context_->createUnboundBuffer(out_, what.out_bytes());
    }
  }

  void Run(uint32_t tag) override {
    switch (what_.op) {
      case Op::kAllReduce: {
        gloo::AllreduceOptions options(context_);
        options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
        options.setReduceFunction(Sum());
        options.setOutput(out_, out_count_);
        options.setTag(tag);
        return gloo::allreduce(options);
      }
      case Op::kReduce: {
        gloo::ReduceOptions options(context_);
        options.setReduceFunction(Sum());
        options.setOutput(out_, out_count_);
        options.setRoot(kRoot);
        options.setTag(tag);
        return gloo::reduce(options);
      }
      case Op::kBroadcast: {
        gloo::BroadcastOptions options(context_);
        options.setOutput(out_, out_count_);
        options.setRoot(kRoot);
        options.setTag(tag);
        return gloo::broadcast(options);
      }
      case Op::kAllGather: {
        gloo::AllgatherOptions options(context_);
        options.setInput(in_, in_count_);
        options.setOutput(out_, out_count_);
        options.setTag(tag);
        return gloo::allgather(options);
      }
      case Op::kAllToAll: {
        gloo::AlltoallOptions options(context_);
        options.setInput(in_, in_count_);
        options.setOutput(out_, out_count_);
        options.setTag(tag);
        return gloo::alltoall(options);
      }
      case Op::kReduceScatter:
        reduce_scatter_->run();
        // It leaves the result at the beginning of what it was given.
        std::copy_n(in_, out_count_, out_);
        return;
      case Op::kSendRecv: {
        const int rank = context_->rank, world = context_->size;
        received_->recv((rank + world - 1) % world, tag);
        sent_->send((rank + 1) % world, tag);
        sent_->waitSend(kTimeout);
        received_->waitRecv(kTimeout);
        return;
      }
      case Op::kBarrier: {
        gloo::BarrierOptions options(context_);
        options.setTag(tag);
        return gloo::barrier(options);
      }
    }
  }

 private:
  static std::function<void(void*, const void*, const void*, size_t)> Sum() {
    return [](void* out, const void* a, const void* b, size_t n) { gloo::sum<T>(out, a, b, n); };
  }

  const Context context_;
  const Case what_;
  T* const in_;
  T* const out_;
  const size_t in_count_, out_count_;
  std::unique_ptr<gloo::Algorithm> reduce_scatter_;
  std::unique_ptr<UnboundBuffer> sent_, received_;
};

std::unique_ptr<Plan> MakePlan(const Context& context, const Case& what, void* in, void* out) {
  switch (what.scalar) {
    case Scalar::kFloat64:
      return std::make_unique<TypedPlan<double>>(context, what, in, out);
    case Scalar::kFloat16:
      return std::make_unique<TypedPlan<gloo::float16>>(context, what, in, out);
    case Scalar::kInt32:
      return std::make_unique<TypedPlan<int32_t>>(context, what, in, out);
    case Scalar::kInt64:
      return std::make_unique<TypedPlan<int64_t>>(context, what, in, out);
    case Scalar::kFloat32:
    case Scalar::kBFloat16:
      break;
  }
  return std::make_unique<TypedPlan<float>>(context, what, in, out);
}

// Gloo throws.
template <typename Call>
std::string TroubleOf(const Call& call) {
  try {
    call();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

class RawGloo : public Collectives {
 public:
  explicit RawGloo(Context context) : context_(std::move(context)) {}

  std::string WhyNot(const Case& what) override {
    if (what.scalar == Scalar::kBFloat16) return "Gloo has no bfloat16";
    if (what.registered) return "Gloo's TCP has no registered memory";
    return "";
  }
  std::string Prepare(const Case& what, void* in, void* out) override {
    return TroubleOf([&] { plan_ = MakePlan(context_, what, in, out); });
  }
  void Forget() override { plan_ = nullptr; }
  std::string Run(const Case&, void*, void*) override {
    return TroubleOf([&] { plan_->Run(tag_++); });
  }

 private:
  const Context context_;
  std::unique_ptr<Plan> plan_;
  uint32_t tag_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collectives>> ConnectRawGloo(const Seat& seat) {
  std::unique_ptr<Collectives> collectives;
  const std::string trouble = TroubleOf([&] {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = "127.0.0.1";
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(attributes);
    gloo::rendezvous::FileStore store(seat.folder);
    auto context = std::make_shared<gloo::rendezvous::Context>(seat.rank, seat.world);
    context->setTimeout(kTimeout);
    context->connectFullMesh(store, device);
    collectives = std::make_unique<RawGloo>(std::move(context));
  });
  if (!trouble.empty())
    return absl::UnavailableError(absl::StrCat("Gloo cannot connect its ranks: ", trouble));
  return collectives;
}

}  // namespace evenkeel::bench
