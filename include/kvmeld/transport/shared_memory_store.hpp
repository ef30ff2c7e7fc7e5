#pragma once

#include <string>

#include <kvmeld/status.hpp>
#include <kvmeld/transport/file_store.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

[[nodiscard]] inline Result<std::string> shared_memory_folder(const std::string& name) {
  constexpr std::size_t longest = 200;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == '-';
    if (!plain)
      return error(ErrorCode::invalid_argument,
                   "a shared memory store's name has letters, digits, . _ -, not byte ", int{c});
  }
  if (name.empty() || name.size() > longest) {
    return error(ErrorCode::invalid_argument, "a shared memory store's name has 1 to ", longest,
                 " bytes, not ", name.size());
  }
  return "/dev/shm/kvmeld." + name;
}

}  // namespace detail

/// Opens the store that processes of this machine share by name, in memory: a `FileStore` under
/// /dev/shm without syncing.
///
/// Holds until the machine stops or `remove_shared_memory_store`; processes may come, go and die.
/// It counts as memory, up to the size of /dev/shm, beyond which it is `store_full`. Errors: those
/// of `FileStore::open`; `invalid_argument` for a name with other bytes than letters, digits, `.`,
/// `_`, `-`, and for a name that another user has taken, unless `folder_mode` lets other users in.
[[nodiscard]] inline Result<FileStore> shared_memory_store(const std::string& name,
                                                           FileStoreOptions options = {}) {
  auto folder = detail::shared_memory_folder(name);
  if (!folder) return folder.error();
  options.durability = Durability::none;
  options.folder_must_be_own = (options.folder_mode & 077U) == 0;
  return FileStore::open(*folder, options);
}

/// Frees the memory of a store, except what processes have mapped.
inline Status remove_shared_memory_store(const std::string& name) {
  auto folder = detail::shared_memory_folder(name);
  if (!folder) return folder.error();
  return FileStore::remove(*folder);
}

KVMELD_NAMESPACE_END
