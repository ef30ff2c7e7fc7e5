// The processes of one MPI job read a part of the facts each, merge their caches in one step, and
// all end with the same one. Started by mpiexec; examples/run.sh 05 does that. Writes
// build/all_merge.json.

#include "support/note_agent.hpp"
#include "support/study.hpp"

#include <kvmeld/mpi/all_merge.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

using namespace example;
using nlohmann::json;

struct Flags {
  std::string model;
  std::string output = "build/all_merge.json";
  std::size_t questions = 12;
  std::uint64_t seed = 2;
  int threads = 1;
};

struct Job {
  int rank = 0;
  int size = 1;
};

/// One rank's part; the all-merge is the only place where it meets the others.
kvmeld::Result<json> take_part(const Flags& flags, const Job& job) {
  const auto say = [&](const char* what) {
    if (job.rank == 0) std::fprintf(stderr, "\r%-60s", what);
  };
  say("every rank loads the model");
  const auto agents = static_cast<std::size_t>(job.size);
  const FactSet facts =
      make_fact_set(Task::single, agents, flags.seed, 0, flags.questions, flags.questions, 2);
  const auto merger = kvmeld::merger();
  kvmeld::FragmentSet set;
  kvmeld::Status status;
  auto agent = NoteAgent::open(flags.model, flags.threads);
  if (!agent) status = agent.error();
  if (status) status = set.insert((*agent)->prefix());
  if (status) {
    say("every rank reads its notes");
    const auto fragment = (*agent)->read(facts.notes[static_cast<std::size_t>(job.rank)]);
    status = fragment
                 ? set.insert(*fragment, kvmeld::Dot{static_cast<std::uint64_t>(job.rank), 0, 1})
                 : fragment.error();
  }
  // A rank that failed must not leave the others waiting in the merge.
  int failed = status ? 0 : 1;
  (void)MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (!status) return status;
  if (failed > 0)
    return kvmeld::Status(kvmeld::ErrorCode::unavailable,
                          std::to_string(failed) + " other ranks could not read their notes");

  say("merge");
  const Stopwatch merging;
  const auto report = kvmeld::mpi::all_merge(MPI_COMM_WORLD, set, merger.digest());
  if (!report) return report.error();
  const double wait_ms = merging.milliseconds();
  say("every rank answers");
  const auto taken = (*agent)->take(set, merger);
  if (!taken) return taken.error();
  const auto right = (*agent)->right_answers(facts.questions, taken->tokens);
  if (!right) return right.error();
  json out{{"content_digest", taken->content_digest.hex()},
           {"set_digest", set.digest().hex()},
           {"right", *right},
           {"total", facts.questions.size()},
           {"tokens", taken->tokens},
           {"bytes_sent", report->sent_bytes},
           {"bytes_received", report->received_bytes},
           {"dedup_hits", report->dedup_hits},
           {"wait_ms", wait_ms},
           {"render_ms", taken->render_ms}};
  if (job.rank == 0) {
    say("rank 0 reads everything as text, to compare");
    const auto length = (*agent)->read_text(facts.notes);
    if (!length) return length.error();
    const auto full = (*agent)->right_answers(facts.questions, *length);
    if (!full) return full.error();
    out["full_text_right"] = *full;
    say("");
    std::fprintf(stderr, "\r");
  }
  return out;
}

/// Everybody's result at rank 0, in the order of ranks.
std::vector<json> gather(const json& mine, const Job& job) {
  const std::string text = mine.dump();
  const int own = static_cast<int>(text.size());
  std::vector<int> sizes(static_cast<std::size_t>(job.size)), places(sizes.size());
  (void)MPI_Gather(&own, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
  int total = 0;
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    places[r] = total;
    total += sizes[r];
  }
  std::string all(static_cast<std::size_t>(job.rank == 0 ? total : 0), ' ');
  (void)MPI_Gatherv(text.data(), own, MPI_CHAR, all.data(), sizes.data(), places.data(), MPI_CHAR,
                    0, MPI_COMM_WORLD);
  std::vector<json> out;
  for (std::size_t r = 0; job.rank == 0 && r < sizes.size(); ++r) {
    out.push_back(json::parse(
        all.substr(static_cast<std::size_t>(places[r]), static_cast<std::size_t>(sizes[r])),
        nullptr, false));
  }
  return out;
}

bool print(const Flags& flags, const std::vector<json>& results) {
  // a rank that dies ends an MPI job
  json out{
      {"agents", results.size()}, {"content_digests", json::array()}, {"killed_and_back", nullptr}};
  bool complete = true, equal = true;
  std::size_t right = ~std::size_t{0}, total = 0;
  std::uint64_t bytes = 0, dedup = 0;
  double wait_ms = 0, render_ms = 0;
  std::printf("%-6s %-34s %10s %8s %12s %12s %6s %9s %10s\n", "rank", "content digest", "right",
              "tokens", "bytes out", "bytes in", "dedup", "wait ms", "render ms");
  for (std::size_t r = 0; r < results.size(); ++r) {
    const json& one = results[r];
    if (one.contains("error")) {
      complete = false;
      std::printf("%-6zu failed: %s\n", r, one["error"].get<std::string>().c_str());
      continue;
    }
    std::printf("%-6zu %-34s %4zu of %-3zu %7zu %12llu %12llu %6zu %9.0f %10.1f\n", r,
                one["content_digest"].get<std::string>().c_str(), one["right"].get<std::size_t>(),
                one["total"].get<std::size_t>(), one["tokens"].get<std::size_t>(),
                static_cast<unsigned long long>(one["bytes_sent"].get<std::uint64_t>()),
                static_cast<unsigned long long>(one["bytes_received"].get<std::uint64_t>()),
                one["dedup_hits"].get<std::size_t>(), one["wait_ms"].get<double>(),
                one["render_ms"].get<double>());
    out["content_digests"].push_back(one["content_digest"]);
    equal = equal && one["content_digest"] == out["content_digests"][0];
    right = std::min(right, one["right"].get<std::size_t>());
    total = one["total"];
    bytes += one["bytes_sent"].get<std::uint64_t>();
    dedup += one["dedup_hits"].get<std::uint64_t>();
    wait_ms = std::max(wait_ms, one["wait_ms"].get<double>());
    render_ms = std::max(render_ms, one["render_ms"].get<double>());
    if (one.contains("full_text_right")) out["full_text_right"] = one["full_text_right"];
  }
  equal = equal && complete;
  out["content_digests_equal"] = equal;
  out["right"] = complete ? right : 0;
  out["total"] = total;
  out["bytes_sent"] = bytes;
  out["dedup_hits"] = dedup;
  out["wait_ms"] = wait_ms;
  out["render_ms"] = render_ms;
  // What every rank answers from the merged cache must come near to what one that read everything
  // answers.
  const bool answers = complete && out.contains("full_text_right") &&
                       10 * right >= 9 * out["full_text_right"].get<std::size_t>();
  if (out.contains("full_text_right"))
    std::printf("full text in one prompt: %zu of %zu\n", out["full_text_right"].get<std::size_t>(),
                total);
  if (complete && !answers)
    std::printf("FEWER right answers than nine tenths of full text's: %zu\n", right);
  std::printf("content digests %s; %s\n", equal ? "equal" : "DIFFER", flags.output.c_str());
  if (!study::write_results(flags.output, out)) return false;
  return equal && answers;
}

}  // namespace

int main(int argc, char** argv) {
  (void)MPI_Init(&argc, &argv);
  Job job;
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &job.size);
  Flags flags;
  CLI::App app("The processes of an MPI job merge the caches of what each has read.");
  study::add_common(app, flags);
  app.add_option("--questions", flags.questions,
                 "facts, dealt out to the ranks, with a question about each")
      ->check(CLI::Range(4, 32))
      ->capture_default_str();
  int status = 0;
  try {
    app.parse(argc, argv);
    if (job.size > 8) throw CLI::ValidationError("ranks", "1 to 8 share the facts");
  } catch (const CLI::ParseError& error) {  // the same on every rank
    status = job.rank == 0 ? app.exit(error) : error.get_exit_code();
    (void)MPI_Finalize();
    return status;
  }
  const auto result = take_part(flags, job);
  const std::vector<json> all =
      gather(result ? *result : json{{"error", result.error().message()}}, job);
  if (job.rank == 0) status = print(flags, all) ? 0 : 1;
  (void)MPI_Bcast(&status, 1, MPI_INT, 0, MPI_COMM_WORLD);
  (void)MPI_Finalize();
  return status;
}
