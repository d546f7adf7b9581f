#include "evenkeel/comm/tcp/message.h"

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/tcp/collectives.h"

namespace evenkeel::internal {
namespace {

// Goes ahead of a message's data: one half of the message, which the other half must match.
constexpr size_t kNoteBytes = 128;

struct PairNote {
  uint64_t hash = 0;
  int64_t sequence = 0;
  std::string text;  // For people.

  static PairNote Of(const Operation& operation, const RankNames& names) {
    PairNote note{HashOfCommonPart(operation), operation.sequence, names.TextOf(operation.what)};
    const std::vector<int64_t> parts = PartsOf(operation);
    if (parts.size() > 1) absl::StrAppend(&note.text, " in parts ", absl::StrJoin(parts, "+"));
    if (operation.scale != 1.0) absl::StrAppend(&note.text, ", scale ", operation.scale);
    return note;
  }
  std::string Serialize() const {
    constexpr size_t kMostText = kNoteBytes - sizeof(hash) - sizeof(sequence) - sizeof(uint32_t);
    std::string bytes =
        ByteWriter().U64(hash).I64(sequence).Bytes(text.substr(0, kMostText)).Take();
    bytes.resize(kNoteBytes);
    return bytes;
  }
  static PairNote Parse(absl::string_view bytes) {
    ByteReader reader(bytes);
    PairNote note{.hash = reader.U64(), .sequence = reader.I64(), .text = ""};
    note.text = std::string(reader.Bytes());
    return note;
  }
};

}  // namespace

TcpMessage::TcpMessage(Operation operation, TcpTransport& transport, int rank, uint64_t generation,
                       const RankNames& names, std::function<void()> on_news)
    : operation_(std::move(operation)), rank_(rank), names_(names) {
  const TensorList& views = IsSend() ? operation_.in : operation_.out;
  if (views.size() == 1) {
    data_ = views[0];
  } else {
    data_ = TensorView(nullptr, CountOf(views), operation_.what.dtype);
    memory_.reset(new (std::nothrow) char[data_.bytes()]);
    data_.data = memory_.get();
    if (memory_ == nullptr) {
      failed_ = absl::ResourceExhaustedError("no memory");
      on_news();
      return;
    }
    if (IsSend()) Copy(views, {data_});
  }
  const int peer = operation_.what.root;
  const auto tag = static_cast<uint64_t>(operation_.what.tag);
  const uint64_t notes =
      TcpSlot(TcpSlots::kNotes, StableHash(StableHash(generation, operation_.channel), tag));
  const uint64_t slot = TcpSlot(TcpSlots::kMessages, TagOf(operation_, generation));
  note_ = IsSend() ? PairNote::Of(operation_, names_).Serialize() : std::string(kNoteBytes, '\0');
  if (IsSend()) {
    ahead_ = transport.Send(peer, notes, note_.data(), note_.size(), on_news);
    if (data_.bytes() > 0) behind_ = transport.Send(peer, slot, data_.data, data_.bytes(), on_news);
  } else {
    ahead_ = transport.Receive(peer, notes, note_.data(), note_.size(), on_news);
    // Asked for at once, so that large data need not wait for the note.
    if (data_.bytes() > 0)
      behind_ = transport.Receive(peer, slot, data_.data, data_.bytes(), on_news);
  }
}

std::optional<absl::Status> TcpMessage::Result() {
  if (!failed_.ok()) return failed_;
  if (!ahead_.HasEnded()) return std::nullopt;
  absl::Status status = ahead_.Wait(absl::InfinitePast());
  if (status.ok() && !IsSend()) status = CheckNotes();
  if (!status.ok()) return status;
  if (!behind_.HasEnded()) return std::nullopt;
  status = behind_.Wait(absl::InfinitePast());
  if (status.ok() && !IsSend() && memory_ != nullptr) Copy({data_}, operation_.out);
  return status;
}

absl::Status TcpMessage::CheckNotes() const {
  const PairNote sent = PairNote::Parse(note_), expected = PairNote::Of(operation_, names_);
  if (sent.hash == expected.hash && sent.sequence == expected.sequence) return absl::OkStatus();
  return Disagreement({{names_[operation_.what.root], AtOperation{sent.sequence, sent.text}},
                       {names_[rank_], AtOperation{expected.sequence, expected.text}}});
}

}  // namespace evenkeel::internal
