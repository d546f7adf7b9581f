#include "evenkeel/tools/bench/raw_gloo.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gloo/allreduce.h"
#include "gloo/math.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/file_store.h"
#include "gloo/transport/tcp/device.h"

namespace evenkeel::bench {
namespace {

using Context = std::shared_ptr<gloo::Context>;

constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(60);

// Gloo throws.
template <typename Call>
absl::Status Caught(const Call& call) {
  try {
    call();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::UnavailableError(error.what());
  }
}

class RawGloo : public Transport {
 public:
  explicit RawGloo(Context context) : context_(std::move(context)) {}

  absl::Status Supports(const Case& what) const override { return OnlyAllReduce(what, "Gloo"); }
  absl::Status Run(const Case& what, float*, float* out) override {
    return Caught([&] {
      gloo::AllreduceOptions options(context_);
      options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
      options.setReduceFunction([](void* sum, const void* a, const void* b, size_t n) {
        gloo::sum<float>(sum, a, b, n);
      });
      options.setOutput(out, static_cast<size_t>(what.count()));
      options.setTag(tag_++);
      gloo::allreduce(options);
    });
  }

 private:
  const Context context_;
  uint32_t tag_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> ConnectRawGloo(const std::string& folder, int rank,
                                                          int world) {
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, world);
  const absl::Status status = Caught([&] {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = "127.0.0.1";
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(attributes);
    gloo::rendezvous::FileStore store(folder);
    context->setTimeout(kTimeout);
    context->connectFullMesh(store, device);
  });
  if (!status.ok())
    return absl::UnavailableError(
        absl::StrCat("Gloo cannot connect its ranks: ", status.message()));
  return std::make_unique<RawGloo>(std::move(context));
}

}  // namespace evenkeel::bench
