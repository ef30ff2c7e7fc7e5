#pragma once

/// What every study shares: its command line and its file of results.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

namespace study {

/// Adds the options that the members of `flags` name: `model`, `output`, `seed`, `threads`.
template <class Flags>
void add_common(CLI::App& app, Flags& flags) {
  app.add_option("--model", flags.model, "a GGUF file")->required()->check(CLI::ExistingFile);
  if constexpr (requires { flags.output; })
    app.add_option("--output", flags.output, "JSON file of the results")->capture_default_str();
  if constexpr (requires { flags.seed; })
    app.add_option("--seed", flags.seed, "of what is generated")->capture_default_str();
  app.add_option("--threads", flags.threads, "of the engine and of merges")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
}

/// The model's name in results: its file's.
inline std::string model_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// Replaces a file of results in one step, so that a stop leaves the old or the new one; makes its
/// folder. False, with a line on stderr, where it cannot be written.
inline bool write_results(const std::string& path, const nlohmann::json& results) {
  std::error_code error;
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty())
    std::filesystem::create_directories(folder, error);
  const std::string part = path + ".part";
  {
    std::ofstream file(part);
    file << results.dump(1) << '\n';
    if (!file.flush()) return std::fprintf(stderr, "cannot write %s\n", part.c_str()), false;
  }
  if (std::rename(part.c_str(), path.c_str()) == 0) return true;
  return std::fprintf(stderr, "cannot write %s\n", path.c_str()), false;
}

}  // namespace study
