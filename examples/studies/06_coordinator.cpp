// A coordinator between an agent in C++ and one in Python, over gRPC with TLS. Each contributes its
// notes; the coordinator is killed in the middle and started again; both end with the same state.
// Writes build/coordinator.json.
//
// Python runs no model here: a process beside it seals its notes into a file, and renders what
// Python has agreed to.

#include "support/note_agent.hpp"
#include "support/study.hpp"

#include <kvmeld/coordinator/grpc_client.hpp>
#include <kvmeld/coordinator/grpc_server.hpp>
#include <kvmeld/replica/openssl.hpp>
#include <kvmeld/stores/file.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace example;
using nlohmann::json;
using Auth = kvmeld::replica::HmacSha256;

struct Flags {
  std::string model;
  std::string python = "python3";
  std::string output = "build/coordinator.json";
  std::size_t questions = 12;
  std::uint64_t seed = 2;
  int threads = 1;
  bool kill = true;
};

constexpr kvmeld::replica::MemberId cpp_member = 1, python_member = 2, coordinator_member = 100;
constexpr std::uint64_t session = 1, round_number = 1;
constexpr const char* secret = "a secret that only this session's members know";
constexpr std::int64_t patience_ms = 300'000;

/// Files by which the processes meet; gone with it.
class Folder {
 public:
  Folder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "kvmeld-coordinator-").string() +
        std::string(6, 'X');
    if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] std::string read(const std::string& name) const {
    std::ifstream file(*this / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  [[nodiscard]] bool has(const std::string& name) const {
    return std::filesystem::exists(*this / name);
  }
  /// Whole or not at all.
  bool write(const std::string& name, const std::string& text) const {
    std::ofstream file(*this / (name + ".part"), std::ios::binary);
    file << text;
    file.close();
    return file.good() &&
           std::rename((*this / (name + ".part")).c_str(), (*this / name).c_str()) == 0;
  }
  /// False where it does not come in time, or where some process has failed.
  [[nodiscard]] bool wait_for(const std::string& name) const {
    for (std::int64_t waited_ms = 0; waited_ms < patience_ms; waited_ms += 20) {
      if (has(name)) return true;
      if (has("failed")) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }

 private:
  std::string path_;
};

kvmeld::replica::FrameOptions frame(const Flags& flags) {
  return {kvmeld::replica::frame_namespace(
              "examples", std::filesystem::path(flags.model).filename().string(), ""),
          std::size_t{1} << 26, std::make_shared<Auth>(std::string_view(secret))};
}
FactSet facts(const Flags& flags) {
  return make_fact_set(Task::single, 2, flags.seed, 0, flags.questions, flags.questions, 2);
}

// ---- processes; each returns what went wrong

kvmeld::Status serve(const Flags& flags, const Folder& folder, const std::string& port) {
  auto store = kvmeld::stores::FileStore::open(folder / "store");
  if (!store) return store.error();
  kvmeld::coordinator::CoordinatorOptions options{
      .replica = {.self = coordinator_member,
                  .epoch = kvmeld::replica::fresh_epoch(),
                  .frame = frame(flags),
                  .merger = kvmeld::merger().digest()}};
  options.members = {cpp_member, python_member};
  options.soft_ms = patience_ms;
  kvmeld::coordinator::CoordinatorServer server(*store, options);
  if (kvmeld::Status status = server.start(
          "127.0.0.1:" + port,
          {.certificate = folder.read("certificate"), .private_key = folder.read("key")});
      !status)
    return status;
  if (!folder.write("port", std::to_string(server.port())))
    return {kvmeld::ErrorCode::store_full, "cannot write into the temporary folder"};
  while (true) ::pause();
}

kvmeld::coordinator::CoordinatorClient client(const Flags& flags, const Folder& folder,
                                              kvmeld::replica::MemberId self) {
  kvmeld::coordinator::CoordinatorClientOptions options;
  options.self = self;
  options.frame = frame(flags);
  options.tls.root_certificates = folder.read("certificate");
  options.timeout_ms = patience_ms;
  return kvmeld::coordinator::CoordinatorClient("127.0.0.1:" + folder.read("port"), options);
}

kvmeld::Result<kvmeld::FragmentSet> read_notes(NoteAgent& agent,
                                               const std::vector<std::string>& notes,
                                               kvmeld::replica::MemberId self) {
  kvmeld::FragmentSet set;
  if (kvmeld::Status status = set.insert(agent.prefix(), kvmeld::Dot{self, 0, 1}); !status)
    return status;
  const auto fragment = agent.read(notes);
  if (!fragment) return fragment.error();
  if (kvmeld::Status status = set.insert(*fragment, kvmeld::Dot{self, 1, 1}); !status)
    return status;
  return set;
}

/// Renders a round's cut with the payloads of a set, asks all questions, and adds to a report.
kvmeld::Status answer(NoteAgent& agent, const kvmeld::coordinator::MergedCut& cut,
                      const kvmeld::FragmentSet& set, const FactSet& known, json& report) {
  const auto rendered = kvmeld::replica::restrict_to(
      {session, cut.round, coordinator_member, cut.version.merger, cut.set}, set);
  if (!rendered) return rendered.error();
  const auto taken = agent.take(*rendered, kvmeld::merger());
  if (!taken) return taken.error();
  const auto right = agent.right_answers(known.questions, taken->tokens);
  if (!right) return right.error();
  report.update({{"content_digest", taken->content_digest.hex()},
                 {"set_digest", cut.version.set.hex()},
                 {"right", *right},
                 {"total", known.questions.size()},
                 {"tokens", taken->tokens},
                 {"render_ms", taken->render_ms}});
  return {};
}

kvmeld::Status cpp_agent(const Flags& flags, const Folder& folder) {
  auto opened = NoteAgent::open(flags.model, flags.threads);
  if (!opened) return opened.error();
  NoteAgent& agent = **opened;
  const FactSet known = facts(flags);
  auto set = read_notes(agent, known.notes[0], cpp_member);
  if (!set) return set.error();
  auto coordinator = client(flags, folder, cpp_member);
  if (const auto published = coordinator.publish(*set); !published) return published.error();
  if (!folder.write("published", "1"))
    return {kvmeld::ErrorCode::store_full, "cannot write into the temporary folder"};
  const Stopwatch waiting;
  const auto cut = coordinator.wait_for_merge(session, round_number, kvmeld::merger().digest(),
                                              set->context(), patience_ms);
  if (!cut) return cut.error();
  if (const auto synced = coordinator.sync(*set); !synced) return synced.error();
  json report{{"agent", "C++"},
              {"wait_ms", waiting.milliseconds()},
              {"retries", coordinator.traffic().retries}};
  if (kvmeld::Status status = answer(agent, *cut, *set, known, report); !status) return status;
  const auto length = agent.read_text(known.notes);
  if (!length) return length.error();
  const auto full = agent.right_answers(known.questions, *length);
  if (!full) return full.error();
  report["full_text_right"] = *full;
  report["bytes_sent"] = coordinator.traffic().sent_bytes;
  report["dedup_hits"] = coordinator.traffic().dedup_hits;
  folder.write("cpp.json", report.dump());
  return {};
}

/// Seals Python's notes into a file, and, once Python has the merge, renders it in Python's place.
kvmeld::Status python_engine(const Flags& flags, const Folder& folder) {
  auto opened = NoteAgent::open(flags.model, flags.threads);
  if (!opened) return opened.error();
  const FactSet known = facts(flags);
  auto set = read_notes(**opened, known.notes[1], python_member);
  if (!set) return set.error();
  const auto parcel = kvmeld::coordinator::make_parcel(*set);
  if (!parcel) return parcel.error();
  if (!folder.write("parcel", *parcel))
    return {kvmeld::ErrorCode::store_full,
            "cannot write a parcel of " + std::to_string(parcel->size()) + " bytes"};
  if (!folder.wait_for("python.json"))
    return {kvmeld::ErrorCode::timed_out, "Python came to no merge"};
  auto coordinator = client(flags, folder, python_member);
  const auto cut = coordinator.wait_for_merge(session, round_number, kvmeld::merger().digest(),
                                              set->context(), patience_ms);
  if (!cut) return cut.error();
  if (const auto synced = coordinator.sync(*set); !synced) return synced.error();
  json report{{"agent", "Python's engine"},
              {"bytes_sent", coordinator.traffic().sent_bytes},
              {"dedup_hits", coordinator.traffic().dedup_hits}};
  if (kvmeld::Status status = answer(**opened, *cut, *set, known, report); !status) return status;
  folder.write("engine.json", report.dump());
  return {};
}

// ---- the launcher

pid_t start(const Folder& folder, const char* name, const std::function<kvmeld::Status()>& run) {
  std::fflush(nullptr);
  const pid_t process = fork();
  if (process != 0) return process;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const kvmeld::Status status = run();
  if (!status) {
    std::fprintf(stderr, "\n%s: %s\n", name, status.message().c_str());
    folder.write("failed", name);
  }
  std::fflush(nullptr);
  _exit(status ? 0 : 1);
}

std::string digits(const kvmeld::Digest128& digest) {
  std::string out;
  for (const char c : kvmeld::coordinator::detail::namespace_bytes(digest)) {
    char two[3];
    (void)std::snprintf(two, sizeof two, "%02x",
                        static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += two;
  }
  return out;
}

kvmeld::Status run_python(const Flags& flags, const Folder& folder) {
  if (!folder.wait_for("parcel")) return {kvmeld::ErrorCode::timed_out, "nothing to publish"};
  const std::vector<std::string> words{flags.python,
                                       "examples/studies/06_agent.py",
                                       "--address",
                                       "127.0.0.1:" + folder.read("port"),
                                       "--namespace",
                                       digits(frame(flags).scope),
                                       "--member",
                                       std::to_string(python_member),
                                       "--root-certificates",
                                       folder / "certificate",
                                       "--publish",
                                       folder / "parcel",
                                       "--session",
                                       std::to_string(session),
                                       "--round",
                                       std::to_string(round_number),
                                       "--merger",
                                       digits(kvmeld::merger().digest()),
                                       "--timeout",
                                       std::to_string(patience_ms / 1000),
                                       "--output",
                                       folder / "python.json"};
  std::vector<const char*> arguments;
  for (const std::string& word : words) arguments.push_back(word.c_str());
  arguments.push_back(nullptr);
  const pid_t python = fork();
  if (python == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("KVMELD_KEY", secret, 1);  // the command line is everybody's to read
    execvp(arguments[0], const_cast<char* const*>(arguments.data()));
    _exit(127);
  }
  int status = 0;
  if (waitpid(python, &status, 0) != python || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return {kvmeld::ErrorCode::unavailable, "the Python agent failed"};
  return {};
}

bool print(const Flags& flags, const Folder& folder, bool killed_and_back) {
  json cpp = json::parse(folder.read("cpp.json"), nullptr, false),
       engine = json::parse(folder.read("engine.json"), nullptr, false);
  const json python = json::parse(folder.read("python.json"), nullptr, false);
  if (cpp.is_discarded() || engine.is_discarded() || python.is_discarded()) return false;
  std::printf("%-16s %-34s %10s %8s %10s\n", "agent", "content digest", "right", "tokens",
              "render ms");
  for (const json* one : {&cpp, &engine}) {
    std::printf("%-16s %-34s %4zu of %-3zu %7zu %10.1f\n",
                (*one)["agent"].get<std::string>().c_str(),
                (*one)["content_digest"].get<std::string>().c_str(),
                (*one)["right"].get<std::size_t>(), (*one)["total"].get<std::size_t>(),
                (*one)["tokens"].get<std::size_t>(), (*one)["render_ms"].get<double>());
  }
  const bool same_set =
      python["set_digest"] == cpp["set_digest"] && python["set_digest"] == engine["set_digest"];
  const bool equal = same_set && cpp["content_digest"] == engine["content_digest"];
  std::printf("Python's set digest %s, %s; %zu fragments, hashes %s\n",
              python["set_digest"].get<std::string>().substr(0, 16).c_str(),
              same_set ? "as the others'" : "DIFFERENT", python["fragments"].size(),
              python["verified"].get<bool>() ? "checked" : "not checked (no xxhash)");
  const json out{
      {"agents", 2},
      {"content_digests", {cpp["content_digest"], engine["content_digest"]}},
      {"content_digests_equal", equal},
      {"right", std::min(cpp["right"].get<std::size_t>(), engine["right"].get<std::size_t>())},
      {"total", cpp["total"]},
      {"full_text_right", cpp["full_text_right"]},
      {"bytes_sent", cpp["bytes_sent"].get<std::uint64_t>() +
                         python["bytes_sent"].get<std::uint64_t>() +
                         engine["bytes_sent"].get<std::uint64_t>()},
      {"dedup_hits",
       cpp["dedup_hits"].get<std::uint64_t>() + engine["dedup_hits"].get<std::uint64_t>()},
      {"wait_ms", cpp["wait_ms"]},
      {"render_ms", std::max(cpp["render_ms"].get<double>(), engine["render_ms"].get<double>())},
      {"killed_and_back", killed_and_back}};
  std::printf(
      "full text in one prompt: %zu of %zu\ncontent digests %s; coordinator killed and back: %s; "
      "%s\n",
      cpp["full_text_right"].get<std::size_t>(), cpp["total"].get<std::size_t>(),
      equal ? "equal" : "DIFFER", killed_and_back ? "yes" : "no", flags.output.c_str());
  if (!study::write_results(flags.output, out)) return false;
  // What both answer from the merged cache must come near to what one that read everything answers.
  const bool answers =
      10 * out["right"].get<std::size_t>() >= 9 * out["full_text_right"].get<std::size_t>();
  if (!answers)
    std::printf("FEWER right answers than nine tenths of full text's: %zu\n",
                out["right"].get<std::size_t>());
  if (flags.kill && !killed_and_back)
    std::printf("the coordinator was to be killed and to come back, and DID NOT\n");
  return equal && answers && (killed_and_back || !flags.kill);
}

int launch(const Flags& flags) {
  const Folder folder;
  const std::string openssl =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
      "/CN=coordinator -addext subjectAltName=IP:127.0.0.1 -keyout " +
      folder / "key" + " -out " + folder / "certificate" + " 2>/dev/null";
  if (std::system(openssl.c_str()) != 0)
    return std::fprintf(stderr, "openssl could not make a certificate\n"), 1;
  // Everything is forked before gRPC is used anywhere: it has threads, and they do not survive a
  // fork.
  const auto serving = [&] {
    return start(folder, "coordinator", [&] {
      return serve(flags, folder, folder.has("port") ? folder.read("port") : "0");
    });
  };
  pid_t coordinator = serving();
  if (!folder.wait_for("port")) return 1;
  const pid_t others[] = {
      start(folder, "C++ agent", [&] { return cpp_agent(flags, folder); }),
      start(folder, "Python's engine", [&] { return python_engine(flags, folder); }),
      start(folder, "Python agent", [&] { return run_python(flags, folder); })};
  bool killed = false;
  std::size_t running = std::size(others);
  bool good = true;
  const Stopwatch watch;
  while (running > 0) {
    for (int status = 0; const pid_t process : others) {
      if (waitpid(process, &status, WNOHANG) != process) continue;
      --running;
      good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    // one agent's notes are acknowledged, the round is still open
    if (flags.kill && !killed && folder.has("published")) {
      ::kill(coordinator, SIGKILL);
      waitpid(coordinator, nullptr, 0);
      killed = true;
      coordinator = serving();
    }
    const char* const state = folder.has("python.json") ? "the round is merged; agents answer"
                              : folder.has("parcel")    ? "Python publishes and waits"
                                                        : "agents read their notes";
    std::fprintf(stderr, "\r%5.0f s  %-50s%s", watch.milliseconds() / 1000, state,
                 killed ? " (the coordinator was killed and started again)" : "");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::fprintf(stderr, "\r%-120s\r", "");
  const bool back = killed && waitpid(coordinator, nullptr, WNOHANG) == 0;
  ::kill(coordinator, SIGKILL);
  waitpid(coordinator, nullptr, 0);
  return good && print(flags, folder, back) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "An agent in C++ and one in Python merge what they have read through a coordinator, which is "
      "killed and comes back.");
  study::add_common(app, flags);
  app.add_option("--python", flags.python, "a Python with grpc and google.protobuf")
      ->capture_default_str();
  app.add_option("--questions", flags.questions,
                 "facts, dealt out to the two agents, with a question about each")
      ->check(CLI::Range(4, 32))
      ->capture_default_str();
  app.add_flag("!--no-kill", flags.kill, "let the coordinator live");
  CLI11_PARSE(app, argc, argv);
  return launch(flags);
}
