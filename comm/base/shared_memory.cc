#include "evenkeel/comm/base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/available_memory.h"
#include "evenkeel/comm/base/errno_text.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/status.h"

// Missing in older systems' headers.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace evenkeel::internal {
namespace {

// A signal interrupts fallocate(), which then undoes its work. Pieces of this size finish between
// two ticks of a profiler.
constexpr int64_t kPiece = int64_t{8} << 20;

absl::Status NoMemory(int64_t bytes, absl::string_view why) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot allocate ", bytes, " bytes of shared memory: ", why));
}

absl::StatusOr<UniqueFd> NewFile() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(memfd_create("evenkeel", kFlags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = UniqueFd(memfd_create("evenkeel", kFlags));  // Before Linux 6.3.
  if (fd) return fd;
  if (errno == ENOSYS) return absl::UnimplementedError(ErrnoText("memfd_create"));
  return absl::ResourceExhaustedError(ErrnoText("memfd_create"));
}

[[noreturn]] void Die(const std::string& why) {
  Warn(nullptr, why);
  std::abort();
}

// Maps it with all page tables, so that no operation pays for them. Returns null and sets errno if
// there is not enough memory.
std::byte* MapFile(const UniqueFd& fd, int64_t offset, int64_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), offset);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_HUGEPAGE);  // Where the host allows it for shared memory.
  if (madvise(data, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {  // Linux 5.14.
    const int error = errno;
    munmap(data, bytes);
    errno = error;
    return nullptr;
  }
  return static_cast<std::byte*>(data);
}

// Too large an allocation would not fail: the kernel would kill a process to make room.
absl::Status CheckAvailable(int64_t bytes) {
  const AvailableMemory left = ReadAvailableMemory();
  if (bytes > left.bytes || bytes > std::numeric_limits<int64_t>::max() - PageBytes()) {
    return NoMemory(bytes, absl::StrCat(left.of, " has ", left.bytes, " left"));
  }
  return absl::OkStatus();
}

absl::Status AllocateAll(const UniqueFd& fd, int64_t offset, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(kPiece, bytes - done);
    if (fallocate(fd.get(), 0, offset + done, size) == 0) {
      done += size;
    } else if (errno != EINTR) {
      return NoMemory(bytes, ErrnoText("fallocate"));
    }
  }
  return absl::OkStatus();
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;

}  // namespace

int64_t PageBytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Create(int64_t bytes) {
  return CreateSealed(bytes, kSeals | F_SEAL_GROW);
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::CreateGrowing(int64_t bytes) {
  return CreateSealed(bytes, kSeals);
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::CreateSealed(int64_t bytes, int seals) {
  if (bytes < 0)
    return absl::InvalidArgumentError(absl::StrCat("shared memory of ", bytes, " bytes"));
  EK_RETURN_IF_ERROR(CheckAvailable(bytes));
  const int64_t rounded =
      std::max<int64_t>(1, (bytes + PageBytes() - 1) / PageBytes()) * PageBytes();
  EK_ASSIGN_OR_RETURN(UniqueFd fd, NewFile());
  if (ftruncate(fd.get(), rounded) != 0) return NoMemory(bytes, ErrnoText("ftruncate"));
  EK_RETURN_IF_ERROR(AllocateAll(fd, 0, rounded));
  if (fcntl(fd.get(), F_ADD_SEALS, seals) != 0) {
    return absl::InternalError(ErrnoText("shared memory cannot be sealed: fcntl"));
  }
  std::byte* const data = MapFile(fd, 0, rounded);
  if (data == nullptr) return NoMemory(bytes, ErrnoText("mmap"));
  return std::shared_ptr<SharedMemory>(new SharedMemory(data, rounded, std::move(fd)));
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Part(int64_t offset,
                                                                 int64_t bytes) const {
  // Pages that another process has allocated are not checked again: that would take longer than the
  // rest.
  if (lseek(fd_.get(), offset, SEEK_HOLE) < offset + bytes) {
    EK_RETURN_IF_ERROR(CheckAvailable(bytes));
    EK_RETURN_IF_ERROR(AllocateAll(fd_, offset, bytes));
  }
  std::byte* const data = MapFile(fd_, offset, bytes);
  if (data == nullptr) return NoMemory(bytes, ErrnoText("mmap"));
  return std::shared_ptr<SharedMemory>(new SharedMemory(data, bytes, UniqueFd()));
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Map(int descriptor, int64_t bytes) {
  UniqueFd fd(descriptor);
  struct stat file = {};
  if (fstat(fd.get(), &file) != 0)
    return absl::InvalidArgumentError(ErrnoText("cannot map shared memory: fstat"));
  // Memory that its owner can shrink could end this process with a SIGBUS.
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || file.st_size <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a file of ", file.st_size, " bytes is not shared memory, since it may shrink"));
  }
  if (bytes == 0) bytes = file.st_size;
  if (bytes < 0 || bytes > file.st_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes, " bytes of shared memory that has ", file.st_size));
  }
  std::byte* const data = MapFile(fd, 0, bytes);
  if (data == nullptr) return NoMemory(bytes, ErrnoText("mmap"));
  if ((seals & F_SEAL_GROW) != 0) fd = UniqueFd();
  return std::shared_ptr<SharedMemory>(new SharedMemory(data, bytes, std::move(fd)));
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

// Works piece by piece, because a host without memory for a second copy of everything would kill a
// process. A copy replaces the shared pages in one step: a concurrent reader sees one or the other,
// never a hole.
void SharedMemory::Fence(int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset % PageBytes() != 0 || bytes % PageBytes() != 0 ||
      offset > bytes_ || bytes > bytes_ - offset) {
    Die(absl::StrCat("Fence(", offset, ", ", bytes, ") of ", bytes_, " bytes"));
  }
  for (const int64_t end = offset + bytes; offset < end;) {
    const int64_t size = std::min(kPiece, end - offset);
    void* const copy = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (copy != MAP_FAILED) std::memcpy(copy, data_ + offset, size);
    if (copy == MAP_FAILED ||
        mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + offset) == MAP_FAILED) {
      // Otherwise a peer that is still in an ended operation could change memory that the user
      // considers its own.
      Die(absl::StrCat("cannot take ", size,
                       " bytes of shared memory back from peers: ", std::strerror(errno)));
    }
    FreePages(offset, size);
    offset += size;
  }
}

void SharedMemory::Discard() { FreePages(0, bytes_); }

// If the call fails, the pages are freed when the last process unmaps them. A forked child has the
// memory, too, and must not free its parent's pages.
void SharedMemory::FreePages(int64_t offset, int64_t bytes) {
  if (!fd_ || getpid() != made_by_) return;
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

}  // namespace evenkeel::internal
