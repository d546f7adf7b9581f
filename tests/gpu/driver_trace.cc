#include "evenkeel/tests/gpu/driver_trace.h"

#include <cupti.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

absl::Status FromCupti(absl::string_view what, CUptiResult result) {
  if (result == CUPTI_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  cuptiGetResultString(result, &text);
  return absl::InternalError(absl::StrCat(what, ": ", text == nullptr ? "unknown" : text));
}

class CuptiTrace : public DriverTrace {
 public:
  ~CuptiTrace() override {
    if (subscriber_ != nullptr) cuptiUnsubscribe(subscriber_);
  }

  absl::Status Subscribe() {
    EK_RETURN_IF_ERROR(
        FromCupti("cuptiSubscribe", cuptiSubscribe(&subscriber_, &CuptiTrace::OnCall, this)));
    return FromCupti("cuptiEnableDomain",
                     cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API));
  }

  int calls(absl::string_view prefix) const override {
    absl::MutexLock lock(&mutex_);
    int calls = 0;
    for (const auto& [name, count] : counts_) calls += absl::StartsWith(name, prefix) ? count : 0;
    return calls;
  }
  std::vector<std::string> Waits() const override {
    absl::MutexLock lock(&mutex_);
    std::vector<std::string> waits;
    for (const auto& [name, count] : counts_) {
      if (WaitsForDevice(name)) waits.push_back(absl::StrCat(name, ": ", count));
    }
    return waits;
  }

 private:
  static void CUPTIAPI OnCall(void* self, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                              const void* data) {
    const auto* const call = static_cast<const CUpti_CallbackData*>(data);
    if (domain != CUPTI_CB_DOMAIN_DRIVER_API || call->callbackSite != CUPTI_API_ENTER) return;
    auto* const trace = static_cast<CuptiTrace*>(self);
    absl::MutexLock lock(&trace->mutex_);
    ++trace
          ->counts_[call->functionName == nullptr ? absl::StrCat("call ", id) : call->functionName];
  }

  CUpti_SubscriberHandle subscriber_ = nullptr;
  mutable absl::Mutex mutex_;
  std::map<std::string, int> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<DriverTrace>> DriverTrace::Start() {
  auto trace = std::make_unique<CuptiTrace>();
  EK_RETURN_IF_ERROR(trace->Subscribe());
  return trace;
}

bool WaitsForDevice(absl::string_view call) {
  if (absl::StrContains(call, "Synchronize")) return true;
  if (absl::StrContains(call, "Async")) return false;
  constexpr absl::string_view kWaiting[] = {"cuMemcpy",     "cuMemset",       "cuMemAlloc",
                                            "cuMemFree",    "cuMemHostAlloc", "cuMemUnmap",
                                            "cuModuleLoad", "cuModuleUnload", "cuLibraryLoad",
                                            "cuCtxDestroy", "cuStreamDestroy"};
  return std::any_of(std::begin(kWaiting), std::end(kWaiting),
                     [&](absl::string_view prefix) { return absl::StartsWith(call, prefix); });
}

}  // namespace evenkeel
