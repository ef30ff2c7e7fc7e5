// Three processes share what they have read over Redis: each reads a part of the facts, publishes
// it as fragments, and ends with the same cache. One of them is killed in the middle and started
// again. Writes build/replicas.json.

#include "support/note_agent.hpp"
#include "support/study.hpp"

#include <kvmeld/replica/replica.hpp>
#include <kvmeld/stores/redis.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace example;
using nlohmann::json;

struct Flags {
  std::string model;
  std::string redis;
  std::string output = "build/replicas.json";
  std::size_t agents = 3;
  std::size_t questions = 12;
  std::uint64_t seed = 2;
  int threads = 1;
  bool kill = true;
  int agent = -1;  ///< set in the agents' own processes
};

constexpr std::size_t parts = 2;  // fragments that each agent publishes

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

FactSet facts(const Flags& flags) {
  return make_fact_set(Task::single, flags.agents, flags.seed, 0, flags.questions, flags.questions,
                       2);
}

/// The sentences of one of an agent's fragments.
std::vector<std::string> part_of(const std::vector<std::string>& notes, std::size_t part) {
  const std::size_t half = (notes.size() + parts - 1) / parts;
  const auto at = [&](std::size_t i) {
    return notes.begin() + static_cast<std::ptrdiff_t>(std::min(i, notes.size()));
  };
  return {at(part * half), at((part + 1) * half)};
}

// ---- an agent's process

/// Says one thing to the launcher: a line of JSON.
void tell(const json& what) {
  std::fputs((what.dump() + "\n").c_str(), stdout);
  std::fflush(stdout);
}

int fail(const kvmeld::Status& status) {
  tell({{"error", status.message()}});
  return 1;
}

int run_agent(const Flags& flags) {
  const auto self = static_cast<kvmeld::replica::MemberId>(flags.agent);
  tell({{"state", "loading the model"}});
  auto opened = NoteAgent::open(flags.model, flags.threads);
  if (!opened) return fail(opened.error());
  NoteAgent& agent = **opened;

  auto store = kvmeld::stores::RedisStore::open(
      {.server = {.unix_socket = flags.redis}, .scope = "replicas"});
  if (!store) return fail(store.error());
  auto transport = kvmeld::stores::RedisTransport::open(
      {.server = {.unix_socket = flags.redis}, .scope = "replicas", .self = self});
  if (!transport) return fail(transport.error());

  const auto merger = kvmeld::merger();
  kvmeld::replica::Replica::Options options{
      .self = self, .epoch = kvmeld::replica::fresh_epoch(), .merger = merger.digest()};
  options.shared_store = true;
  options.max_message_bytes = transport->max_message_bytes();
  options.frame.scope = kvmeld::replica::frame_namespace("examples", agent.geometry()->model, "");
  kvmeld::replica::Replica replica(*store, options);
  if (kvmeld::Status status = replica.open(); !status) return fail(status);

  // One step of the network: hear, tick, say. A lost message or a server that is away for a moment
  // is no error.
  const auto step = [&](std::int64_t wait_ms) {
    while (true) {
      const auto message = transport->receive(wait_ms);
      if (!message || !*message) break;
      (void)replica.receive((*message)->from, (*message)->bytes);
      wait_ms = 0;
    }
    (void)replica.tick(now_ms());
    for (const kvmeld::replica::Outgoing& out : replica.take_outbox())
      (void)transport->send(out.to, out.bytes);
  };

  // What an earlier life of this agent published is in the set already and is not read again.
  const FactSet set = facts(flags);
  const auto known = [&](const Tokens& tokens) {
    const auto entries = replica.set().entries();
    return std::any_of(entries.begin(), entries.end(), [&](const auto& e) {
      return e.fragment.valid() && std::ranges::equal(e.fragment.tokens(), tokens);
    });
  };
  for (int i = 0; i < 50 && replica.wanted() > 0; ++i) step(20);
  std::size_t found = 0;
  if (!replica.insert(agent.prefix()))
    return fail({kvmeld::ErrorCode::unavailable, "the prefix could not be stored"});
  for (std::size_t part = 0; part < parts; ++part) {
    const std::vector<std::string> sentences = part_of(set.notes[self], part);
    if (known(agent.tokens(sentences))) {
      ++found;
    } else {
      tell({{"state", "reads part " + std::to_string(part + 1)}});
      auto fragment = agent.read(sentences);
      if (!fragment) return fail(fragment.error());
      kvmeld::Result<kvmeld::Dot> inserted = replica.insert(*fragment);
      for (int tries = 0; !inserted && tries < 100; ++tries) {  // a server that is away comes back
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        inserted = replica.insert(*fragment);
      }
      if (!inserted) return fail(inserted.error());
    }
    step(0);
    tell({{"state", "published " + std::to_string(part + 1) + " of " + std::to_string(parts)},
          {"published", part + 1}});
  }

  // Until every agent's fragments are here, with all their bytes.
  const std::size_t expected = 1 + flags.agents * parts;
  const Stopwatch waiting;
  std::size_t said = 0;
  while (replica.set().size() < expected || replica.wanted() > 0) {
    step(50);
    if (waiting.milliseconds() > 600'000)
      return fail(
          {kvmeld::ErrorCode::timed_out, "the others' fragments did not arrive in ten minutes"});
    if (said == replica.set().size()) continue;
    said = replica.set().size();
    tell({{"state", "holds " + std::to_string(said) + " of " + std::to_string(expected)}});
  }
  const double wait_ms = waiting.milliseconds();
  const auto taken = agent.take(replica.set(), merger);
  if (!taken) return fail(taken.error());
  tell({{"state", "answers"}});
  const auto right = agent.right_answers(set.questions, taken->tokens);
  if (!right) return fail(right.error());
  json result{{"agent", flags.agent},
              {"content_digest", taken->content_digest.hex()},
              {"set_digest", replica.set().digest().hex()},
              {"right", *right},
              {"total", set.questions.size()},
              {"tokens", taken->tokens},
              {"bytes_sent", replica.counters().stored.bytes},
              {"dedup_hits", replica.counters().stored.dedup_hits},
              {"loaded", replica.counters().fragments_loaded},
              {"found_again", found},
              {"back", found > 0},
              {"wait_ms", wait_ms},
              {"render_ms", taken->render_ms},
              {"import_ms", taken->import_ms},
              {"other_mergers", replica.other_mergers().size()}};
  if (flags.agent == 0) {
    tell({{"state", "reads everything as text, to compare"}});
    const auto length = agent.read_text(set.notes);
    if (!length) return fail(length.error());
    const auto full = agent.right_answers(set.questions, *length);
    if (!full) return fail(full.error());
    result["full_text_right"] = *full;
  }
  tell({{"state", "done"}, {"result", result}});
  return 0;
}

// ---- the launcher

struct Child {
  pid_t pid = -1;
  int pipe = -1;
  std::string partial;
  std::string state = "starts";
  std::size_t published = 0;
  json result;
  std::string error;
};

bool start(Child& child, const Flags& flags, std::size_t index) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  child.pid = fork();
  if (child.pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    Flags own = flags;
    own.agent = static_cast<int>(index);
    _exit(run_agent(own));
  }
  close(ends[1]);
  child.pipe = ends[0];
  child.partial.clear();
  return child.pid > 0;
}

void hear(Child& child) {
  char buffer[4096];
  const ssize_t count = read(child.pipe, buffer, sizeof buffer);
  if (count <= 0) {
    close(child.pipe);
    child.pipe = -1;
    return;
  }
  child.partial.append(buffer, static_cast<std::size_t>(count));
  for (std::size_t end = child.partial.find('\n'); end != std::string::npos;
       end = child.partial.find('\n')) {
    const json line = json::parse(child.partial.substr(0, end), nullptr, false);
    child.partial.erase(0, end + 1);
    if (line.is_discarded()) continue;
    if (line.contains("state")) child.state = line["state"];
    if (line.contains("published")) child.published = line["published"];
    if (line.contains("result")) child.result = line["result"];
    if (line.contains("error")) child.error = line["error"];
  }
}

int launch(const Flags& flags) {
  std::vector<Child> children(flags.agents);
  for (std::size_t i = 0; i < children.size(); ++i) {
    if (!start(children[i], flags, i)) return std::fprintf(stderr, "cannot start a process\n"), 1;
  }
  const std::size_t victim = flags.agents - 1;
  bool killed = false, back = false;
  const Stopwatch watch;
  while (
      std::any_of(children.begin(), children.end(), [](const Child& c) { return c.pipe >= 0; })) {
    std::vector<pollfd> waiting;
    for (const Child& child : children) waiting.push_back({child.pipe, POLLIN, 0});
    (void)::poll(waiting.data(), waiting.size(), 500);
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (waiting[i].revents != 0) hear(children[i]);
    }
    Child& chosen = children[victim];
    // its first part is published, its second is being read
    if (flags.kill && !killed && chosen.published == 1) {
      ::kill(chosen.pid, SIGKILL);
      waitpid(chosen.pid, nullptr, 0);
      close(chosen.pipe);
      killed = true;
      chosen.state = "was killed";
      chosen.published = 0;
      back = start(chosen, flags, victim);
    }
    std::string line;
    for (std::size_t i = 0; i < children.size(); ++i) {
      line += (i > 0 ? " | " : "") + std::to_string(i) +
              (killed && i == victim ? " (again): " : ": ") + children[i].state;
    }
    std::fprintf(stderr, "\r%5.0f s  %-140.140s", watch.milliseconds() / 1000, line.c_str());
  }
  std::fprintf(stderr, "\r%-150s\r", "");
  for (Child& child : children) waitpid(child.pid, nullptr, 0);

  json out{{"agents", flags.agents},
           {"content_digests", json::array()},
           {"killed_and_back", killed && back}};
  bool complete = true, equal = true;
  std::size_t right = ~std::size_t{0}, total = 0;
  std::uint64_t bytes = 0, dedup = 0;
  double wait_ms = 0, render_ms = 0;
  std::printf("%-8s %-34s %10s %8s %10s %6s %9s %10s %10s\n", "agent", "content digest", "right",
              "tokens", "bytes out", "dedup", "wait ms", "render ms", "import ms");
  for (std::size_t i = 0; i < children.size(); ++i) {
    const json& r = children[i].result;
    if (!children[i].error.empty() || r.is_null()) {
      complete = false;
      std::printf(
          "%-8zu failed: %s\n", i,
          children[i].error.empty() ? children[i].state.c_str() : children[i].error.c_str());
      continue;
    }
    std::printf("%-8zu %-34s %4zu of %-3zu %7zu %10llu %6zu %9.0f %10.1f %10.1f%s\n", i,
                r["content_digest"].get<std::string>().c_str(), r["right"].get<std::size_t>(),
                r["total"].get<std::size_t>(), r["tokens"].get<std::size_t>(),
                static_cast<unsigned long long>(r["bytes_sent"].get<std::uint64_t>()),
                r["dedup_hits"].get<std::size_t>(), r["wait_ms"].get<double>(),
                r["render_ms"].get<double>(), r["import_ms"].get<double>(),
                r["back"].get<bool>() ? "  (found its own part again)" : "");
    out["content_digests"].push_back(r["content_digest"]);
    equal = equal && r["content_digest"] == out["content_digests"][0];
    right = std::min(right, r["right"].get<std::size_t>());
    total = r["total"];
    bytes += r["bytes_sent"].get<std::uint64_t>();
    dedup += r["dedup_hits"].get<std::uint64_t>();
    wait_ms = std::max(wait_ms, r["wait_ms"].get<double>());
    render_ms = std::max(render_ms, r["render_ms"].get<double>());
    if (r.contains("full_text_right")) out["full_text_right"] = r["full_text_right"];
    if (flags.kill && i == victim) out["killed_and_back"] = killed && back && r["back"].get<bool>();
  }
  equal = equal && complete;
  out["content_digests_equal"] = equal;
  out["right"] = complete ? right : 0;
  out["total"] = total;
  out["bytes_sent"] = bytes;
  out["dedup_hits"] = dedup;
  out["wait_ms"] = wait_ms;
  out["render_ms"] = render_ms;
  if (out.contains("full_text_right"))
    std::printf("full text in one prompt: %zu of %zu\n", out["full_text_right"].get<std::size_t>(),
                total);
  std::printf("content digests %s; %.0f s; %s\n", equal ? "equal" : "DIFFER",
              watch.milliseconds() / 1000, flags.output.c_str());
  if (!study::write_results(flags.output, out)) return false;
  // Right is judged against full text: an answer may fail that the model gets wrong from the text
  // itself.
  const bool answers = out.contains("full_text_right") &&
                       10 * right >= 9 * out["full_text_right"].get<std::size_t>();
  return complete && equal && answers && (!flags.kill || out["killed_and_back"].get<bool>()) ? 0
                                                                                             : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Three processes share what they have read over Redis; one is killed and comes back.");
  study::add_common(app, flags);
  app.add_option("--redis", flags.redis,
                 "socket of a Redis or Valkey server (examples/run.sh starts one)")
      ->required();
  app.add_option("--agents", flags.agents, "processes")
      ->check(CLI::Range(2, 8))
      ->capture_default_str();
  app.add_option("--questions", flags.questions,
                 "facts, dealt out to the agents, with a question about each")
      ->check(CLI::Range(4, 32))
      ->capture_default_str();
  app.add_flag("!--no-kill", flags.kill, "let all agents live");
  CLI11_PARSE(app, argc, argv);
  return launch(flags);
}
