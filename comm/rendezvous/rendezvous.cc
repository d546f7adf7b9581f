#include "evenkeel/comm/rendezvous/rendezvous.h"

#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/read_file.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr size_t kSecretBytes = 32;

// The folder is <folder of this user>/<job>; both are accessible to the user only.
absl::StatusOr<std::shared_ptr<FileStore>> OpenFolder(const std::string& folder, bool is_ours) {
  if (is_ours) EK_RETURN_IF_ERROR(FileStore::Open(folder.substr(0, folder.rfind('/'))).status());
  return FileStore::Open(folder);
}

// Without one, makes it in the store that is shared, or, for an observer, returns NotFound.
absl::StatusOr<std::string> SecretOf(const Environment& environment, Store* shared,
                                     bool may_make = true) {
  if (!environment.secret.empty()) return environment.secret;
  if (environment.secret_file.empty()) {
    if (!may_make) {
      if (shared != nullptr && shared->Check(kSecretKey).value_or(false))
        return shared->Get(kSecretKey, absl::ZeroDuration());
      return absl::NotFoundError("the job has no secret yet, or has ended");
    }
    EK_ASSIGN_OR_RETURN(const std::string fresh, internal::RandomBytes(kSecretBytes));
    return shared->GetOrSet(kSecretKey, absl::BytesToHexString(fresh));
  }
  EK_ASSIGN_OR_RETURN(std::string secret,
                      internal::ReadFile(environment.secret_file, internal::Links::kFollow));
  absl::StripAsciiWhitespace(&secret);
  if (!secret.empty()) return secret;
  return absl::InvalidArgumentError(
      absl::StrCat("EVENKEEL_SECRET_FILE=", environment.secret_file, " is empty"));
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

absl::StatusOr<std::shared_ptr<Rendezvous>> Rendezvous::Join(const Environment& environment,
                                                             absl::Duration timeout,
                                                             std::shared_ptr<Store> through) {
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
  if (through == nullptr) through = job->folder_;
  if (!environment.store_folder.empty() || through != job->folder_)
    job->options_.published = through;
  EK_ASSIGN_OR_RETURN(job->options_.secret, SecretOf(environment, through.get()));
  if (environment.hosts_store) {
    const absl::Status hosting = job->Host(environment);
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

absl::Status Rendezvous::Host(const Environment& environment) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> places, PlacesToListen(environment));
  if (options_.published != nullptr) EK_RETURN_IF_ERROR(CheckThatNobodyHosts(options_));
  absl::Status last;
  for (const std::string& place : places) {
    absl::StatusOr<std::unique_ptr<TcpStoreServer>> server =
        TcpStoreServer::Create({.address = place,
                                .job = options_.job,
                                .secret = options_.secret,
                                .world_size = options_.world_size,
                                .host = "rank 0"});
    last = server.status();
    if (!last.ok()) continue;
    if (!environment.is_one_host) EK_RETURN_IF_ERROR(CheckReachable(**server, place));
    server_ = *std::move(server);
    break;
  }
  if (!last.ok()) {
    return absl::Status(
        last.code(),
        absl::StrCat("rank 0 cannot host the job's store: ", last.message(),
                     places.size() == 1 ? ". If another program uses the port, set "
                                          "EVENKEEL_STORE=host:port or MASTER_PORT to a "
                                          "free one, the same for all ranks"
                                        : absl::StrCat(" (the other ", places.size() - 1,
                                                       " addresses failed before)")));
  }
  if (options_.published == nullptr) return absl::OkStatus();
  EK_RETURN_IF_ERROR(options_.published->Set(kAddressKey, server_->address()));
  if (!environment.observer_folder.empty()) TellObservers(environment.observer_folder);
  return absl::OkStatus();
}

// A job that cannot be observed runs all the same.
void Rendezvous::TellObservers(const std::string& folder) {
  absl::StatusOr<std::shared_ptr<FileStore>> store = OpenFolder(folder, /*is_ours=*/true);
  if (!store.ok()) return;
  for_observers_ = *std::move(store);
  for_observers_->Set(kSecretKey, options_.secret).IgnoreError();
  for_observers_->Set(kAddressKey, server_->address()).IgnoreError();
}

Rendezvous::~Rendezvous() {
  store_ = nullptr;
  const bool has_published = server_ != nullptr && options_.published != nullptr;
  server_ = nullptr;  // Waits for the other ranks.
  if (has_published) options_.published->Delete(kAddressKey).IgnoreError();
  if (for_observers_ != nullptr) {
    for_observers_->Delete(kAddressKey).IgnoreError();
    RemoveFolder(*for_observers_);
  }
  if (!removes_folder_) return;
  RemoveFolder(*folder_);
}

absl::StatusOr<std::unique_ptr<TcpControlLink>> Rendezvous::OpenGroup(const GroupSeat& seat) {
  return TcpControlLink::Connect(options_, seat, shared_from_this());
}

}  // namespace evenkeel
