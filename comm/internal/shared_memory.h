// Memory that processes of one host share, without a name in any file system: nothing is left of it once the last
// process that has it is gone, however that died.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> mine, SharedMemory::Create(1 << 20));
//   // ... mine->fd() goes to the peer over a Unix socket ...
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> theirs, SharedMemory::Map(fd));     // there
//
// It is an anonymous file (memfd_create), so a container's small /dev/shm does not matter. All of it is allocated
// before it is handed out, and sealed against being resized: lack of memory is a status here, not a SIGBUS later.
//
// Units:   bytes; sizes are rounded up to whole pages.
// Threads: thread-safe, apart from the memory itself.

#ifndef EVENKEEL_COMM_INTERNAL_SHARED_MEMORY_H_
#define EVENKEEL_COMM_INTERNAL_SHARED_MEMORY_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "evenkeel/comm/internal/socket.h"

namespace evenkeel::internal {

class SharedMemory {
 public:
  // New, zeroed, mapped to be read and written.
  // Errors: InvalidArgument for a negative size; ResourceExhausted says how many bytes were asked for and how many the
  //         host, or this process's control group, has left.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Create(int64_t bytes);
  // A peer's; takes the descriptor over, and closes it once it is mapped. Refuses what is not sealed against shrinking.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Map(int fd);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // To be handed to peers; -1 if it came from Map().
  int fd() const { return fd_.get(); }

  // From now on nobody else can change [offset, offset + bytes), which are whole pages: they keep address and content,
  // but become this process's alone. Peers that still write to what they have mapped reach nobody, and what they read
  // there becomes zero. Nothing else may write to the range meanwhile. Takes no more memory than before.
  void Fence(int64_t offset, int64_t bytes);
  // Frees the pages now, though peers may have them mapped for long: everybody finds zeros.
  void Discard();

 private:
  SharedMemory(std::byte* data, int64_t bytes, UniqueFd fd)
      : data_(data), bytes_(bytes), fd_(std::move(fd)), made_by_(getpid()) {}
  void FreePages(int64_t offset, int64_t bytes);

  std::byte* const data_;
  const int64_t bytes_;
  const UniqueFd fd_;
  const pid_t made_by_;
};

int64_t PageBytes();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_SHARED_MEMORY_H_
