// Memory that processes of one host share, without a name in any file system: it is gone once the
// last process that has it is gone, however that process ended.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> mine, SharedMemory::Create(1 << 20));
//   // ... mine->fd() goes to the peer over a Unix socket ...
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> theirs, SharedMemory::Map(fd));  // the peer
//
// It is an anonymous file (memfd_create), so a container's small /dev/shm does not matter. All of
// it is allocated before it is handed out, and sealed against resizing: lack of memory is an error
// of Create(), not a later SIGBUS.
//
// Memory that grows has further parts, which any of its processes allocates and maps:
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> part, theirs->Part(offset, bytes));
//
// Units:   bytes; sizes are rounded up to whole pages.
// Threads: thread-safe, apart from the memory itself.

#ifndef EVENKEEL_COMM_BASE_SHARED_MEMORY_H_
#define EVENKEEL_COMM_BASE_SHARED_MEMORY_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel::internal {

class SharedMemory {
 public:
  // Makes new memory, zeroed, mapped for reading and writing.
  // Errors: InvalidArgument for a negative size; ResourceExhausted with the requested bytes, and
  // the bytes that the host or this process's control group has left.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Create(int64_t bytes);
  // The same; Part() gives more of it.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> CreateGrowing(int64_t bytes);
  // Maps a peer's memory, or the first `bytes` of it. Takes the descriptor, and closes it once it
  // is mapped, unless the memory grows. Refuses a file that is not sealed against shrinking.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Map(int fd, int64_t bytes = 0);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Returns the descriptor for peers; -1 for memory from Map() that does not grow.
  int fd() const { return fd_.get(); }

  // Maps the whole pages [offset, offset + bytes) of memory that grows. The first process that has
  // them allocates them, zeroed. Errors: those of Create().
  absl::StatusOr<std::shared_ptr<SharedMemory>> Part(int64_t offset, int64_t bytes) const;

  // Detaches [offset, offset + bytes), which must be whole pages, from all peers: the pages keep
  // address and content, but belong to this process alone. Peers that still write to their mapping
  // change nothing here, and read zeros. No thread may write to the range meanwhile. Takes no more
  // memory than before.
  void Fence(int64_t offset, int64_t bytes);
  // Frees the pages now, although peers may keep them mapped for long: all processes read zeros.
  void Discard();

 private:
  SharedMemory(std::byte* data, int64_t bytes, UniqueFd fd)
      : data_(data), bytes_(bytes), fd_(std::move(fd)), made_by_(getpid()) {}
  static absl::StatusOr<std::shared_ptr<SharedMemory>> CreateSealed(int64_t bytes, int seals);
  void FreePages(int64_t offset, int64_t bytes);

  std::byte* const data_;
  const int64_t bytes_;
  const UniqueFd fd_;
  const pid_t made_by_;
};

int64_t PageBytes();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_SHARED_MEMORY_H_
