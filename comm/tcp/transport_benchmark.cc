// The backend's all-reduce beside Gloo's ring all-reduce over Gloo's own TCP transport, which
// proves nobody's identity. Ranks are threads; connections go over loopback.
//
//   bazel run //comm/tcp:transport_benchmark

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/tcp/collectives.h"
#include "evenkeel/comm/tcp/transport.h"
#include "evenkeel/comm/types.h"
#include "gloo/allreduce.h"
#include "gloo/barrier.h"
#include "gloo/context.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/tcp/device.h"

namespace evenkeel::internal {
namespace {

using Contexts = std::vector<std::shared_ptr<gloo::Context>>;  // By rank.

void OnAllRanks(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

class OursGroup {
 public:
  explicit OursGroup(int world_size) : collectives_(world_size) {
    std::vector<std::unique_ptr<PeerMeeting>> meetings;
    std::vector<std::string> addresses;
    for (int rank = 0; rank < world_size; ++rank) {
      meetings.push_back(
          *PeerMeeting::OverTcp(rank, {"benchmark", world_size, "key"}, "127.0.0.1"));
      addresses.push_back(meetings.back()->address());
    }
    OnAllRanks(world_size, [&](int rank) {
      auto connections = meetings[rank]->Run(addresses, SteadyNow() + absl::Seconds(10)).value();
      collectives_[rank] = std::make_unique<TcpCollectives>(
          TcpTransport::Create(rank, std::move(connections)).value(), rank, world_size,
          /*generation=*/1, RankNames());
    });
  }
  absl::Status AllReduce(int rank, std::vector<float>& data, uint32_t tag) const {
    TcpCollectives& collectives = *collectives_[rank];
    Operation operation;
    operation.what = {.kind = CollectiveKind::kAllReduce,
                      .dtype = DType::kFloat32,
                      .count = static_cast<int64_t>(data.size())};
    operation.sequence = tag;
    operation.in = operation.out = {TensorView(absl::MakeSpan(data))};
    operation.deadline = SteadyNow() + absl::Seconds(30);
    return collectives.Run(operation);
  }

 private:
  std::vector<std::unique_ptr<TcpCollectives>> collectives_;  // By rank.
};

void Add(void* out, const void* a, const void* b, size_t n) {
  const float* x = static_cast<const float*>(a);
  const float* y = static_cast<const float*>(b);
  for (size_t i = 0; i < n; ++i) static_cast<float*>(out)[i] = x[i] + y[i];
}

class GloosContext : public gloo::Context {
 public:
  GloosContext(int rank, int world_size) : gloo::Context(rank, world_size) {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = "127.0.0.1";
    device_ = gloo::transport::tcp::CreateDevice(attributes);
    transportContext_ = device_->createContext(rank, world_size);
    transportContext_->setTimeout(std::chrono::seconds(10));
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) transportContext_->createPair(peer);
    }
  }
};

class GloosGroup {
 public:
  explicit GloosGroup(int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      contexts_.push_back(std::make_shared<GloosContext>(rank, world_size));
    }
    std::vector<std::vector<std::vector<char>>> addresses(
        world_size);  // By rank and peer: the rank's end of the connection.
    for (int rank = 0; rank < world_size; ++rank) {
      addresses[rank].resize(world_size);
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer != rank) addresses[rank][peer] = contexts_[rank]->getPair(peer)->address().bytes();
      }
    }
    OnAllRanks(world_size, [&](int rank) {
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer != rank) contexts_[rank]->getPair(peer)->connect(addresses[peer][rank]);
      }
    });
  }
  absl::Status AllReduce(int rank, std::vector<float>& data, uint32_t tag) const {
    gloo::AllreduceOptions options(contexts_[rank]);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setOutput(data.data(), data.size());
    options.setReduceFunction(gloo::AllreduceOptions::Func(&Add));
    options.setTag(tag);
    options.setTimeout(std::chrono::seconds(30));
    gloo::allreduce(options);
    return absl::OkStatus();
  }

 private:
  Contexts contexts_;
};

// Arguments: ranks, bytes. Rank 0 is the measured thread; the others do as many as it.
template <typename Group>
void BM_AllReduce(benchmark::State& state) {
  const int world_size = static_cast<int>(state.range(0));
  const int64_t count = state.range(1) / static_cast<int64_t>(sizeof(float));
  const Group group(world_size);
  std::vector<std::vector<float>> data(world_size, std::vector<float>(count, 0));
  std::vector<std::thread> others;
  const auto rounds = static_cast<int64_t>(state.max_iterations);
  for (int rank = 1; rank < world_size; ++rank) {
    others.emplace_back([&, rank] {
      for (int64_t i = 0; i < rounds; ++i)
        group.AllReduce(rank, data[rank], static_cast<uint32_t>(i)).IgnoreError();
    });
  }
  uint32_t tag = 0;
  for (auto _ : state) {
    if (const absl::Status status = group.AllReduce(0, data[0], tag++); !status.ok())
      state.SkipWithError(status.ToString().c_str());
  }
  for (std::thread& other : others) other.join();
  state.SetBytesProcessed(state.iterations() * state.range(1));
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgsProduct({{2, 4}, {1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20}})
      ->ArgNames({"ranks", "bytes"})
      ->UseRealTime();
}

BENCHMARK_TEMPLATE(BM_AllReduce, OursGroup)->Apply(Sizes);
BENCHMARK_TEMPLATE(BM_AllReduce, GloosGroup)->Apply(Sizes);

}  // namespace
}  // namespace evenkeel::internal
