#include "evenkeel/comm/rendezvous/rendezvous.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/per_process.h"
#include "evenkeel/comm/base/read_file.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr size_t kSecretBytes = 32, kIdBytes = 16;
constexpr size_t kShortestSecret = 16;  // Of those that people choose.
constexpr char kGaveUpKey[] = "gave up";
constexpr absl::Duration kLook = absl::Seconds(1);

// The folder is <folder of this user>/<job>; both are accessible to the user only.
absl::StatusOr<std::shared_ptr<FileStore>> OpenFolder(const std::string& folder, bool is_ours) {
  if (is_ours) EK_RETURN_IF_ERROR(FileStore::Open(folder.substr(0, folder.rfind('/'))).status());
  return FileStore::Open(folder);
}

// An attacker with a recorded challenge finds a short secret by trying them all.
absl::StatusOr<std::string> LongEnough(std::string secret, absl::string_view source) {
  if (secret.size() >= kShortestSecret) return secret;
  return absl::InvalidArgumentError(absl::StrCat("the secret in ", source, " has ", secret.size(),
                                                 " bytes, so others could guess it: give at ",
                                                 "least ", kShortestSecret,
                                                 ", such as the output of `openssl rand -hex 32`"));
}

absl::StatusOr<std::string> ReadSecret(const Environment& environment) {
  const std::string& path = environment.secret_file;
  EK_ASSIGN_OR_RETURN(std::string secret, internal::ReadFile(path, internal::Links::kFollow));
  absl::StripAsciiWhitespace(&secret);
  struct stat info;
  if (environment.rank == 0 && stat(path.c_str(), &info) == 0 &&
      (info.st_mode & (S_IRGRP | S_IROTH)) != 0) {
    internal::Warn(nullptr, absl::StrCat("other users can read the job's secret in ", path,
                                         " and join the job: chmod 600 ", path));
  }
  return LongEnough(std::move(secret), absl::StrCat("EVENKEEL_SECRET_FILE=", path));
}

// Without one, makes it in the store that is shared, or, for an observer, returns NotFound.
absl::StatusOr<std::string> SecretOf(const Environment& environment, Store* shared,
                                     bool may_make = true) {
  if (!environment.secret.empty()) return LongEnough(environment.secret, "EVENKEEL_SECRET");
  if (!environment.secret_file.empty()) return ReadSecret(environment);
  if (!may_make) {
    if (shared != nullptr && shared->Check(kSecretKey).value_or(false))
      return shared->Get(kSecretKey, absl::ZeroDuration());
    return absl::NotFoundError("the job has no secret yet, or has ended");
  }
  EK_ASSIGN_OR_RETURN(const std::string fresh, internal::RandomBytes(kSecretBytes));
  return shared->GetOrSet(kSecretKey, absl::BytesToHexString(fresh));
}

void RemoveFolder(FileStore& store) {
  store.Delete(kSecretKey).IgnoreError();
  rmdir(store.folder().c_str());  // Fails if it has other files, which is intended.
}

// Returns the addresses on which rank 0 may listen; it takes the first free one.
absl::StatusOr<std::vector<std::string>> PlacesToListen(const Environment& environment) {
  if (environment.store_addresses.empty()) {
    const std::string host = environment.address.empty() ? "127.0.0.1" : environment.address;
    return std::vector<std::string>{internal::HostPort{host, 0}.ToString()};
  }
  std::vector<std::string> places;
  for (const std::string& address : environment.store_addresses) {
    EK_ASSIGN_OR_RETURN(internal::HostPort place, internal::HostPort::Parse(address));
    if (!environment.address.empty()) place.host = environment.address;
    places.push_back(place.ToString());
  }
  return places;
}

// The time to check for a living store at the last address in this folder: a dead one refuses at
// once.
constexpr absl::Duration kGlance = absl::Milliseconds(500);

// A second rank 0 would attract ranks of the first one.
absl::Status CheckThatNobodyHosts(TcpStoreOptions options) {
  const absl::StatusOr<std::string> address =
      options.published->Get(kAddressKey, absl::ZeroDuration());
  if (!address.ok()) return absl::OkStatus();
  options.timeout = kGlance;
  if (!TcpStore::Connect(options).ok()) return absl::OkStatus();  // Left by a job that was killed.
  return absl::AlreadyExistsError(
      absl::StrCat("two processes claim to be rank 0 of this job: another one ",
                   "already hosts its store at ", *address));
}

// On its own host, a host name may resolve to a loopback address, as in Debian's /etc/hosts.
absl::Status CheckReachable(const TcpStoreServer& server, const std::string& place) {
  if (!server.is_on_loopback()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank 0 would listen on ", place,
                   ", a loopback address of this host, which the other hosts cannot reach: set ",
                   "EVENKEEL_ADDRESS on each host to an address that the others can reach"));
}

}  // namespace

// The server of the job, or of all groups of which this process is rank 0.
class Rendezvous::Host {
 public:
  static absl::StatusOr<std::shared_ptr<Host>> Create(const Environment& environment,
                                                      const TcpStoreOptions& options);
  // Returns the server for all groups of which this process is rank 0.
  static absl::StatusOr<std::shared_ptr<Host>> OfProcess(const Environment& environment);
  ~Host() {
    server_ = nullptr;  // Waits for the other ranks.
    if (for_observers_ == nullptr) return;
    for_observers_->Delete(kAddressKey).IgnoreError();
    RemoveFolder(*for_observers_);
  }

  const std::string& address() const { return server_->address(); }
  const std::string& secret() const { return secret_; }

 private:
  // Errors are ignored: a job runs even if it cannot be observed.
  void TellObservers(const std::string& folder) {
    absl::StatusOr<std::shared_ptr<FileStore>> store = OpenFolder(folder, /*is_ours=*/true);
    if (!store.ok()) return;
    for_observers_ = *std::move(store);
    for_observers_->Set(kSecretKey, secret_).IgnoreError();
    for_observers_->Set(kAddressKey, address()).IgnoreError();
  }

  std::string secret_;
  std::unique_ptr<TcpStoreServer> server_;
  std::shared_ptr<FileStore> for_observers_;  // Has the address and the secret.
};

absl::StatusOr<std::shared_ptr<Rendezvous::Host>> Rendezvous::Host::Create(
    const Environment& environment, const TcpStoreOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesToListen(environment));
  auto host = std::make_shared<Host>();
  host->secret_ = options.secret;
  absl::Status last;
  for (const std::string& place : places) {
    absl::StatusOr<std::unique_ptr<TcpStoreServer>> server =
        TcpStoreServer::Create({.address = place,
                                .job = options.job,
                                .secret = options.secret,
                                .world_size = options.world_size,
                                .host = "rank 0"});
    last = server.status();
    if (!last.ok()) continue;
    if (!environment.is_one_host) EK_RETURN_IF_ERROR(CheckReachable(**server, place));
    host->server_ = *std::move(server);
    break;
  }
  if (!last.ok()) {
    const bool has_port = !environment.store_addresses.empty();
    return absl::Status(
        last.code(),
        absl::StrCat("rank 0 cannot host the job's store: ", last.message(),
                     places.size() > 1 ? absl::StrCat(" (the other ", places.size() - 1,
                                                      " addresses failed before)")
                     : has_port        ? ". If another program uses the port, set "
                                         "EVENKEEL_STORE=host:port or MASTER_PORT to a "
                                         "free one, the same for all ranks"
                                       : ""));
  }
  if (!environment.observer_folder.empty()) host->TellObservers(environment.observer_folder);
  return host;
}

absl::StatusOr<std::shared_ptr<Rendezvous::Host>> Rendezvous::Host::OfProcess(
    const Environment& environment) {
  struct Hosts {
    absl::Mutex mutex;
    std::map<std::string, std::weak_ptr<Host>> by_place ABSL_GUARDED_BY(mutex);
  };
  static auto* hosts_of_process = new internal::PerProcess<Hosts>;
  Hosts& hosts = hosts_of_process->Get();
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesToListen(environment));
  EK_RETURN_IF_ERROR(internal::PrepareForRanks(environment.world_size));
  absl::MutexLock lock(&hosts.mutex);
  std::weak_ptr<Host>& known = hosts.by_place[places.front()];
  if (auto living = known.lock(); living != nullptr) return living;
  EK_ASSIGN_OR_RETURN(const std::string secret, internal::RandomBytes(kSecretBytes));
  EK_ASSIGN_OR_RETURN(
      std::shared_ptr<Host> made,
      Create(environment, {.secret = absl::BytesToHexString(secret), .world_size = 0}));
  known = made;
  return made;
}

absl::StatusOr<std::shared_ptr<Rendezvous>> Rendezvous::Join(const Environment& environment,
                                                             absl::Duration timeout) {
  if (environment.world_size < 2)
    return absl::InvalidArgumentError("a job of one rank needs no rendezvous");
  auto job = absl::WrapUnique(new Rendezvous());
  const std::string& folder =
      environment.store_folder.empty() ? environment.secret_folder : environment.store_folder;
  if (!folder.empty()) {
    const bool is_ours = environment.folder_is_ours || environment.store_folder.empty();
    EK_ASSIGN_OR_RETURN(job->folder_, OpenFolder(folder, is_ours));
    job->removes_folder_ = is_ours && environment.rank == 0;
  }
  job->options_ = {.addresses = environment.store_addresses,
                   .job = environment.job,
                   .rank = environment.rank,
                   .world_size = environment.world_size,
                   .host = environment.hosts_store       ? ""
                           : environment.rank_zero_hosts ? "rank 0"
                                                         : "the process",
                   .host_rank = environment.rank_zero_hosts ? 0 : -1,
                   .timeout = timeout};
  // On rank 0's host its name may be a loopback address, on which the store does not listen. A rank
  // does not find out whether that is its host, so each tries its own address, too.
  if (environment.rank_zero_hosts && !environment.address.empty() &&
      !environment.store_addresses.empty()) {
    EK_ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesToListen(environment));
    if (places != environment.store_addresses)
      job->options_.addresses.insert(job->options_.addresses.end(), places.begin(), places.end());
  }
  if (!environment.store_folder.empty()) job->options_.published = job->folder_;
  EK_ASSIGN_OR_RETURN(job->options_.secret, SecretOf(environment, job->folder_.get()));
  if (environment.hosts_store) {
    const auto host = [&]() -> absl::Status {
      if (job->options_.published != nullptr)
        EK_RETURN_IF_ERROR(CheckThatNobodyHosts(job->options_));
      EK_ASSIGN_OR_RETURN(job->host_, Host::Create(environment, job->options_));
      if (job->options_.published == nullptr) return absl::OkStatus();
      return job->options_.published->Set(kAddressKey, job->host_->address());
    };
    const absl::Status hosting = host();
    // It belongs to the other rank 0; or ranks that start later read the secret in it.
    if (!hosting.ok()) job->removes_folder_ = false;
    EK_RETURN_IF_ERROR(hosting);
  }
  EK_ASSIGN_OR_RETURN(job->store_, TcpStore::Connect(job->options_));
  return std::shared_ptr<Rendezvous>(std::move(job));
}

absl::StatusOr<TcpStoreOptions> Rendezvous::Find(const Environment& environment) {
  TcpStoreOptions options{.addresses = environment.store_addresses, .job = environment.job};
  const std::string& folder =
      environment.store_folder.empty() ? environment.secret_folder : environment.store_folder;
  std::shared_ptr<FileStore> store;
  if (!folder.empty()) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(folder, ignored))
      return absl::NotFoundError(absl::StrCat("no job is in the folder ", folder));
    EK_ASSIGN_OR_RETURN(store, FileStore::Open(folder));
  }
  if (!environment.store_folder.empty()) options.published = store;
  EK_ASSIGN_OR_RETURN(options.secret, SecretOf(environment, store.get(), /*may_make=*/false));
  return options;
}

absl::StatusOr<std::shared_ptr<Rendezvous>> Rendezvous::JoinThrough(
    const Environment& environment, absl::Duration timeout, std::shared_ptr<Store> through) {
  auto job = absl::WrapUnique(new Rendezvous());
  job->through_ = std::move(through);
  if (environment.hosts_store) {
    EK_ASSIGN_OR_RETURN(job->host_, Host::OfProcess(environment));
    EK_ASSIGN_OR_RETURN(const std::string id, internal::RandomBytes(kIdBytes));
    const std::string text = absl::StrJoin(
        {job->host_->address(), job->host_->secret(), absl::BytesToHexString(id)}, "\n");
    EK_RETURN_IF_ERROR(job->through_->Set(kAddressKey, text));
  }
  EK_ASSIGN_OR_RETURN(const std::string text, job->through_->Get(kAddressKey, timeout));
  const std::vector<std::string> fields = absl::StrSplit(text, absl::MaxSplits('\n', 2));
  if (fields.size() != 3) return absl::InternalError("the address of the group is malformed");
  if (fields[0].empty()) return absl::UnavailableError(fields[2]);
  job->options_ = {.addresses = {fields[0]},
                   .secret = fields[1],
                   .rank = environment.rank,
                   .world_size = environment.world_size,
                   .host = environment.hosts_store ? "" : "rank 0",
                   .host_rank = 0,
                   .timeout = timeout,
                   .shares_connection = true};
  job->group_id_ = fields[2];
  return std::shared_ptr<Rendezvous>(std::move(job));
}

void Rendezvous::GiveUp(int rank, const absl::Status& why, Store& through) {
  // The first error is the cause: the ranks that give up later may have received it from here.
  std::string text = absl::StrCat("rank ", rank, ": ", why.message());
  const absl::StatusOr<std::string> first = through.Get(kGaveUpKey, absl::ZeroDuration());
  if (first.ok()) text = *first;
  if (!first.ok()) through.Set(kGaveUpKey, text).IgnoreError();
  if (rank == 0)  // The other ranks may still wait for the address.
    through.Set(kAddressKey, absl::StrCat("\n\n", text)).IgnoreError();
}

absl::Status Rendezvous::OthersStatus() {
  const absl::Time now = SteadyNow();
  if (through_ == nullptr || now < look_again_) return absl::OkStatus();
  look_again_ = now + kLook;
  const absl::StatusOr<std::string> text = through_->Get(kGaveUpKey, absl::ZeroDuration());
  return text.ok() ? absl::UnavailableError(*text) : absl::OkStatus();
}

Rendezvous::~Rendezvous() {
  store_ = nullptr;
  const bool has_published = host_ != nullptr && options_.published != nullptr;
  host_ = nullptr;  // Waits for the other ranks if this is its last group.
  if (has_published) options_.published->Delete(kAddressKey).IgnoreError();
  if (!removes_folder_) return;
  RemoveFolder(*folder_);
}

absl::StatusOr<std::unique_ptr<TcpControlLink>> Rendezvous::OpenGroup(const GroupSeat& seat) {
  GroupSeat own = seat;
  own.id = group_id_;
  if (through_ != nullptr)
    own.origin.status = [job = shared_from_this()] { return job->OthersStatus(); };
  EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
                      TcpControlLink::Connect(options_, own, shared_from_this()));
  link->SetOrigin(own.origin.status);
  return link;
}

}  // namespace evenkeel
