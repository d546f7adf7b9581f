#include "evenkeel/comm/group/extension_slot.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/warn.h"

namespace evenkeel::internal {

void ExtensionSlot::OnNotice(int from, absl::string_view topic, absl::string_view notice) {
  if (in_use_ == nullptr) {
    absl::MutexLock lock(&mutex_);
    if (in_use_ == nullptr) {
      early_notices_.push_back({from, std::string(topic), std::string(notice)});
      return;
    }
  }
  in_use_.load()->OnNotice(from, topic, notice);
}

GroupExtension& ExtensionSlot::Get(const std::type_info& type,
                                   absl::FunctionRef<std::unique_ptr<GroupExtension>()> make) {
  if (in_use_ == nullptr) {
    absl::MutexLock lock(&mutex_);
    if (extension_ == nullptr) {
      extension_ = make();
      type_ = &type;
      // Without the lock: a notice may end the group, whose callbacks may call this function. One
      // that arrives meanwhile is appended, so the order is kept.
      while (!early_notices_.empty()) {
        const EarlyNotice early = std::move(early_notices_.front());
        early_notices_.pop_front();
        mutex_.Unlock();
        extension_->OnNotice(early.from, early.topic, early.notice);
        mutex_.Lock();
      }
      in_use_ = extension_.get();
    }
  }
  if (*type_ != type) {
    Warn(nullptr, absl::StrCat("a group has an extension of type ", type_->name(),
                               " and cannot have one of type ", type.name()));
    std::abort();
  }
  return *extension_;
}

}  // namespace evenkeel::internal
