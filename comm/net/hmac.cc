#include "evenkeel/comm/net/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "absl/status/status.h"

namespace evenkeel::internal {

std::string HmacSha256(absl::string_view key, absl::string_view data) {
  std::string digest(kDigestSize, '\0');
  unsigned int size = 0;
  const unsigned char* result =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(data.data()), data.size(),
           reinterpret_cast<unsigned char*>(digest.data()), &size);
  return result != nullptr && size == kDigestSize ? digest : "";
}

bool IsDigest(absl::string_view proof, absl::string_view digest) {
  return proof.size() == kDigestSize && digest.size() == kDigestSize &&
         CRYPTO_memcmp(proof.data(), digest.data(), kDigestSize) == 0;
}

absl::StatusOr<std::string> RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(size)) != 1) {
    return absl::InternalError("OpenSSL returned no random bytes");
  }
  return bytes;
}

}  // namespace evenkeel::internal
