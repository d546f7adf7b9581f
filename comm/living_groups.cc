#include "evenkeel/comm/living_groups.h"

#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace evenkeel::internal {
namespace {

struct Living {
  absl::Mutex mutex;
  std::set<const Communicator*> all ABSL_GUARDED_BY(mutex);
};

Living& TheLiving() {
  static Living* const living =
      new Living;  // Communicators may be destroyed after all other statics.
  return *living;
}

}  // namespace

void AddLiving(const Communicator* comm) {
  Living& living = TheLiving();
  absl::MutexLock lock(&living.mutex);
  living.all.insert(comm);
}

void RemoveLiving(const Communicator* comm) {
  Living& living = TheLiving();
  absl::MutexLock lock(&living.mutex);
  living.all.erase(comm);
}

void ForEachLiving(const std::function<void(const Communicator&)>& visit) {
  Living& living = TheLiving();
  absl::MutexLock lock(&living.mutex);
  for (const Communicator* comm : living.all) visit(*comm);
}

}  // namespace evenkeel::internal
