// Two connected ranks exchange one kind of message, {kind, number, bytes}: "given", with a
// descriptor, and "taken back", without. There are no replies. Both sides only do what needs no
// waiting, so a peer that is stopped costs the others only the room in its socket.

#include "evenkeel/comm/shm/mesh.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/read_file.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr uint8_t kGiven = 1;
constexpr uint8_t kTakenBack = 2;
// Looking into the socket costs more than looking into the table. What a peer takes back without
// giving anything new is noticed after this many look-ups at the latest.
constexpr int kFindsPerDrain = 64;

struct Message {
  uint8_t kind = 0;
  uint64_t id = 0;
  int64_t bytes = 0;

  std::string Serialize() const { return ByteWriter().U8(kind).U64(id).I64(bytes).Take(); }
  static absl::StatusOr<Message> Parse(absl::string_view text) {
    ByteReader reader(text);
    Message message;
    message.kind = reader.U8();
    message.id = reader.U64();
    message.bytes = reader.I64();
    if (message.kind != kGiven && message.kind != kTakenBack) reader.Refuse();
    EK_RETURN_IF_ERROR(reader.Finish("message"));
    return message;
  }
};

// Room for one descriptor, apart from padding.
union Control {
  cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int))];
};

enum class Sent { kYes, kFull, kPeerIsGone };

// `descriptor`: -1 for none.
absl::StatusOr<Sent> Send(const UniqueFd& to, const Message& message, int descriptor) {
  std::string text = message.Serialize();
  iovec part = {text.data(), text.size()};
  Control control = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof(control.bytes);
    cmsghdr* const item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(item), &descriptor, sizeof(int));
  }
  while (sendmsg(to.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
      case ENOMEM:
      case ETOOMANYREFS:  // More descriptors are on their way than this user may have.
        return Sent::kFull;
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN:
        return Sent::kPeerIsGone;
      default:
        return absl::InternalError(ErrnoText("sendmsg"));
    }
  }
  return Sent::kYes;
}

struct Received {
  std::string text;
  UniqueFd fd;
  bool is_too_long = false;
  bool has_lost_descriptors =
      false;  // There was more than one, or no room for it in this process's table.
};

// Nothing: no more has come, or the peer is gone, which others report.
std::optional<Received> Receive(const UniqueFd& from) {
  char text[64];
  iovec part = {text, sizeof(text)};
  Control control = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes;
  header.msg_controllen =
      CMSG_LEN(sizeof(int));  // Without the padding, where a second one would fit in.
  bool was_reset = false;
  while (true) {
    const ssize_t got = recvmsg(from.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    // A peer that has left without reading all: said once, and then comes what it had given before.
    if (got < 0 && errno == ECONNRESET && !std::exchange(was_reset, true)) continue;
    if (got <= 0) return std::nullopt;
    Received received{.text = std::string(text, got)};
    received.is_too_long = (header.msg_flags & MSG_TRUNC) != 0;
    received.has_lost_descriptors = (header.msg_flags & MSG_CTRUNC) != 0;
    const cmsghdr* const item = CMSG_FIRSTHDR(&header);
    if (item != nullptr && item->cmsg_level == SOL_SOCKET && item->cmsg_type == SCM_RIGHTS &&
        item->cmsg_len == CMSG_LEN(sizeof(int))) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(item), sizeof(int));
      received.fd = UniqueFd(descriptor);
    }
    return received;
  }
}

// The memory given by one peer. Not thread-safe.
class Inbox {
 public:
  absl::StatusOr<std::shared_ptr<SharedMemory>> Find(const UniqueFd& from, uint64_t id) {
    auto found = given_.find(id);
    if (found == given_.end() || ++finds_ == kFindsPerDrain) {
      finds_ = 0;
      if (broken_.ok()) broken_ = Drain(from);
      found = given_.find(id);
    }
    if (found == given_.end()) {
      return broken_.ok() ? absl::NotFoundError(absl::StrCat("has not given memory ", id))
                          : broken_;
    }
    Given& given = found->second;
    if (given.fd) {
      auto memory = SharedMemory::Map(given.fd.Release(), given.bytes);
      given.broken = memory.status();
      if (memory.ok()) given.memory = *std::move(memory);
    }
    EK_RETURN_IF_ERROR(given.broken);
    return given.memory;
  }

 private:
  struct Given {
    int64_t bytes = 0;
    UniqueFd fd;  // Until it is mapped.
    std::shared_ptr<SharedMemory> memory;
    absl::Status broken;
  };

  absl::Status Drain(const UniqueFd& from) {
    while (std::optional<Received> received = Receive(from))
      EK_RETURN_IF_ERROR(Take(*std::move(received)));
    return absl::OkStatus();
  }

  absl::Status Take(Received received);

  std::map<uint64_t, Given> given_;  // Ordered, so that all runs close them in one order.
  int finds_ = 0;                    // Since the last look into the socket.
  absl::Status broken_;
};

absl::Status Inbox::Take(Received received) {
  if (received.is_too_long) return absl::InternalError("sent a message that is too long");
  const absl::StatusOr<Message> message = Message::Parse(received.text);
  if (!message.ok())
    return absl::InternalError(absl::StrCat("sent nonsense: ", message.status().message()));
  if (message->kind == kTakenBack) {
    if (!received.fd && given_.erase(message->id) == 1) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("took memory ", message->id, " back, which it had not given"));
  }
  if (received.has_lost_descriptors) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no file descriptor is left for its memory ", message->id));
  }
  if (!received.fd)
    return absl::InternalError(absl::StrCat("sent no descriptor of memory ", message->id));
  const auto [at, is_new] = given_.try_emplace(message->id);
  if (!is_new) return absl::InternalError(absl::StrCat("gave memory ", message->id, " twice"));
  at->second.bytes = message->bytes;
  at->second.fd = std::move(received.fd);
  return absl::OkStatus();
}

}  // namespace

// The memory given to one peer. Not thread-safe.
class ShmMesh::Outbox {
 public:
  // Sends what is owed first.
  absl::StatusOr<Sent> Give(const UniqueFd& to, uint64_t id, const SharedMemory& memory) {
    EK_ASSIGN_OR_RETURN(const Sent paid, Pay(to));
    if (paid != Sent::kYes) return paid;
    return SendOrNote(to, {kGiven, id, memory.bytes()}, memory.fd());
  }
  void TakeBack(const UniqueFd& to, uint64_t id) {
    if (is_gone_) return;
    owed_.push_back(id);
    Pay(to).IgnoreError();  // The next time, then.
  }

 private:
  absl::StatusOr<Sent> Pay(const UniqueFd& to) {
    while (!owed_.empty()) {
      EK_ASSIGN_OR_RETURN(const Sent sent, SendOrNote(to, {kTakenBack, owed_.front(), 0}, -1));
      if (sent != Sent::kYes) return sent;
      owed_.pop_front();
    }
    return Sent::kYes;
  }
  absl::StatusOr<Sent> SendOrNote(const UniqueFd& to, const Message& message, int descriptor) {
    if (is_gone_) return Sent::kPeerIsGone;
    EK_ASSIGN_OR_RETURN(const Sent sent, Send(to, message, descriptor));
    if (sent == Sent::kPeerIsGone) {
      is_gone_ = true;
      owed_.clear();
    }
    return sent;
  }

  std::deque<uint64_t> owed_;  // To be taken back, when there is room.
  bool is_gone_ = false;
};

struct ShmMesh::Peer {
  UniqueFd fd;
  absl::Mutex mutex;
  Inbox inbox ABSL_GUARDED_BY(mutex);
};

absl::StatusOr<std::unique_ptr<ShmMesh>> ShmMesh::Listen(int rank, const PeerGroup& group) {
  if (rank < 0 || rank >= group.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", group.world_size));
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<PeerMeeting> meeting, PeerMeeting::OnThisHost(rank, group));
  return absl::WrapUnique(new ShmMesh(rank, group, std::move(meeting)));
}

ShmMesh::ShmMesh(int rank, const PeerGroup& group, std::unique_ptr<PeerMeeting> meeting)
    : rank_(rank),
      world_size_(group.world_size),
      names_(group.names),
      meeting_(std::move(meeting)),
      outboxes_(group.world_size) {}

ShmMesh::~ShmMesh() = default;

const std::string& ShmMesh::address() const { return meeting_->address(); }

absl::Status ShmMesh::Connect(const std::vector<std::string>& addresses, absl::Time deadline) {
  if (!peers_.empty())
    return absl::FailedPreconditionError("Connect: the ranks are connected already");
  EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting_->Run(addresses, deadline));
  for (UniqueFd& connection : connections) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->fd = std::move(connection);
  }
  return absl::OkStatus();
}

absl::Status ShmMesh::Give(uint64_t id, const SharedMemory& memory, absl::Span<const int> to) {
  absl::MutexLock lock(&mutex_);
  const auto [at, is_new] = given_.try_emplace(id, world_size_);
  if (is_new) {
    if (const absl::Status status = CheckGivable(id, memory); !status.ok()) {
      given_.erase(at);
      return status;
    }
  }
  return GiveTo(to, at->second, id, memory);
}

absl::Status ShmMesh::Give(uint64_t id, const SharedMemory& memory) {
  std::vector<int> all(world_size_);
  std::iota(all.begin(), all.end(), 0);
  return Give(id, memory, all);
}

void ShmMesh::TakeBack(uint64_t id) {
  absl::MutexLock lock(&mutex_);
  const auto given = given_.find(id);
  if (given == given_.end()) return;
  const std::vector<bool> has = std::move(given->second);
  given_.erase(given);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (has[peer]) outboxes_[peer].TakeBack(peers_[peer]->fd, id);
  }
}

absl::StatusOr<std::shared_ptr<SharedMemory>> ShmMesh::Find(int peer, uint64_t id) {
  if (peer < 0 || peer >= static_cast<int>(peers_.size()) || peer == rank_) {
    return absl::InvalidArgumentError(
        absl::StrCat("Find: rank ", names_[peer], " is not connected to rank ", names_[rank_]));
  }
  Peer& from = *peers_[peer];
  absl::MutexLock lock(&from.mutex);
  absl::StatusOr<std::shared_ptr<SharedMemory>> memory = from.inbox.Find(from.fd, id);
  if (!memory.ok()) return Annotate(memory.status(), absl::StrCat("rank ", names_[peer]));
  return memory;
}

void ShmMesh::Close() {
  meeting_->Cancel(absl::CancelledError("shared memory: the group is closed"));
}

absl::Status ShmMesh::CheckGivable(uint64_t id, const SharedMemory& memory) const {
  if (peers_.empty()) return absl::FailedPreconditionError("Give: the ranks are not connected yet");
  if (memory.fd() >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("Give: memory ", id, " is another rank's"));
}

absl::Status ShmMesh::GiveTo(absl::Span<const int> to, std::vector<bool>& has, uint64_t id,
                             const SharedMemory& memory) {
  absl::Status failed;
  std::vector<int> full;
  for (const int peer : to) {
    if (peer == rank_ || has[peer]) continue;
    const absl::StatusOr<Sent> sent = outboxes_[peer].Give(peers_[peer]->fd, id, memory);
    if (!sent.ok()) {
      failed = Annotate(sent.status(), absl::StrCat("memory ", id, " for rank ", names_[peer]));
    } else if (*sent == Sent::kFull) {
      full.push_back(peer);
    } else {
      has[peer] = true;
    }
  }
  EK_RETURN_IF_ERROR(failed);
  if (full.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("rank ", names_[rank_], " cannot give memory ", id,
                                             " to ", RankList(names_.Of(full)), " yet: no room"));
}

absl::StatusOr<std::string> HostIdentity() {
  EK_ASSIGN_OR_RETURN(const std::string boot,
                      ReadFile("/proc/sys/kernel/random/boot_id", Links::kFollow));
  std::string identity = absl::StrCat(absl::StripAsciiWhitespace(boot));
  for (const char* const path : {"/proc/self/ns/net", "/proc/self/ns/user"}) {
    struct stat file = {};
    if (stat(path, &file) != 0) return FileError(path);
    absl::StrAppend(&identity, " ", file.st_dev, ":", file.st_ino);
  }
  return absl::StrCat(identity, " ", geteuid());
}

}  // namespace evenkeel::internal
