// The place of a group's extension (comm/group_extension.h), and the notices that arrive before it
// is made.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_GROUP_EXTENSION_SLOT_H_
#define EVENKEEL_COMM_GROUP_EXTENSION_SLOT_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <typeinfo>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/group_extension.h"

namespace evenkeel::internal {

class ExtensionSlot {
 public:
  // Returns the extension; the first call makes it. Ends the process if the extension has another
  // type.
  GroupExtension& Get(const std::type_info& type,
                      absl::FunctionRef<std::unique_ptr<GroupExtension>()> make);
  // Returns the extension once it has handled the early notices; null before that.
  GroupExtension* in_use() const { return in_use_; }
  // Returns the number of training steps that this rank has begun.
  int64_t position() const { return in_use_ == nullptr ? 0 : in_use_.load()->position(); }
  void OnNotice(int from, absl::string_view topic, absl::string_view notice);

 private:
  struct EarlyNotice {
    int from = 0;
    std::string topic, notice;
  };

  absl::Mutex mutex_;
  std::deque<EarlyNotice> early_notices_ ABSL_GUARDED_BY(mutex_);
  // Set once, before `in_use_`.
  std::unique_ptr<GroupExtension> extension_;
  const std::type_info* type_ = nullptr;
  std::atomic<GroupExtension*> in_use_ = nullptr;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_EXTENSION_SLOT_H_
