// A store in a folder of a file system that all ranks can see.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<FileStore> store, FileStore::Open("/shared/jobs/42"));
//
// Each value is a file of its own, written under another name and then renamed, so that no process
// reads half a value. The folder is created if needed. It and the files are accessible to the owner
// only, because their content (a job's secret) admits to the job: a folder that belongs to another
// user, or is accessible to others, is refused.
//
// Errors: those of Store; PermissionDenied for a folder that is accessible to others, with the
//         command that fixes it.

#ifndef EVENKEEL_COMM_RENDEZVOUS_FILE_STORE_H_
#define EVENKEEL_COMM_RENDEZVOUS_FILE_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/store.h"

namespace evenkeel {

class FileStore : public Store {
 public:
  static absl::StatusOr<std::unique_ptr<FileStore>> Open(std::string folder);

  absl::Status Set(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout) override;
  absl::StatusOr<std::string> GetOrSet(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t amount) override;
  absl::StatusOr<bool> Check(absl::string_view key) override;
  absl::StatusOr<bool> Delete(absl::string_view key) override;

  const std::string& folder() const { return folder_; }

 private:
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}

  const std::string folder_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_FILE_STORE_H_
