#pragma once
// Facts split between agents, and questions about them: made from a seed, the same on every
// machine.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace example {

/// splitmix64: the standard library's distributions differ between implementations, these draws do
/// not.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }
  /// `count` different entries of `pool`, in random order.
  template <std::size_t N>
  std::vector<std::string> pick(const std::array<std::string_view, N>& pool, std::size_t count) {
    std::vector<std::string> all(pool.begin(), pool.end());
    shuffle(all);
    all.resize(count < N ? count : N);
    return all;
  }

 private:
  std::uint64_t state_;
};

enum class Task { single, two_hop, two_hop_steps };

inline std::string_view name(Task task) {
  return task == Task::single ? "single" : task == Task::two_hop ? "two_hop" : "two_hop_steps";
}

/// A statement to complete as the notes say; the answer is its next word.
struct Ask {
  std::string start;
  std::string answer;
  std::vector<std::string> candidates;  ///< Holds the answer once.
};

/// One ask; in two steps, `link` is asked first and the name it yields replaces every `@` of
/// `last`.
struct Question {
  Ask last;
  Ask link;
};

struct FactSet {
  std::vector<std::vector<std::string>> notes;  // (agent, sentence)
  std::vector<Question> questions;
};

namespace detail {

// Every place is one token after a space in the default model's vocabulary, so that its rank needs
// no further decode.
inline constexpr std::array<std::string_view, 32> places{
    "attic",    "garage",    "kitchen", "cellar",   "library", "garden",  "office",  "tower",
    "barn",     "studio",    "bedroom", "basement", "chapel",  "school",  "stable",  "museum",
    "bakery",   "harbor",    "station", "market",   "theater", "hotel",   "bank",    "church",
    "hospital", "warehouse", "temple",  "castle",   "cabin",   "factory", "gallery", "palace"};
inline constexpr std::array<std::string_view, 48> people{
    "Milo",   "Clara",  "Hugo",   "Nadia",  "Oscar",  "Petra", "Simon",  "Tessa",
    "Viktor", "Wanda",  "Boris",  "Elena",  "Felix",  "Greta", "Henry",  "Ivan",
    "Julia",  "Kevin",  "Laura",  "Marco",  "Nina",   "Paul",  "Rosa",   "Stefan",
    "Igor",   "Ursula", "Vera",   "Walter", "Anna",   "Bruno", "Carmen", "David",
    "Emma",   "Frank",  "Gloria", "Harold", "Irene",  "Jack",  "Karen",  "Leon",
    "Martha", "Nora",   "Oliver", "Peter",  "Robert", "Sofia", "Thomas", "Yves"};
inline constexpr std::array<std::string_view, 36> trades{
    "courier",  "doctor",  "painter",   "farmer",   "teacher", "sailor",  "lawyer", "singer",
    "pilot",    "writer",  "dancer",    "engineer", "butcher", "dentist", "guard",  "student",
    "actor",    "hunter",  "nurse",     "judge",    "plumber", "tailor",  "barber", "chemist",
    "captain",  "editor",  "fisherman", "driver",   "janitor", "cook",    "poet",   "banker",
    "sculptor", "surgeon", "miner",     "waiter"};
inline constexpr std::array<std::string_view, 36> things{
    "key",    "lamp",      "map",    "ladder", "drum",   "umbrella", "hammer", "violin",
    "mirror", "blanket",   "kettle", "camera", "basket", "helmet",   "rope",   "clock",
    "flag",   "guitar",    "tent",   "wallet", "vase",   "bicycle",  "bucket", "candle",
    "scarf",  "saddle",    "radio",  "shovel", "trunk",  "compass",  "anchor", "carpet",
    "statue", "telescope", "hat",    "ring"};
inline constexpr std::array<std::string_view, 8> colours{"green", "red",   "blue",  "yellow",
                                                         "white", "black", "brown", "silver"};

/// A sentence in the facts' style that answers no question.
inline std::string neutral(Draw& draw, const std::string& person, const std::string& trade) {
  static constexpr std::array<std::string_view, 12> acts{
      "reads the newspaper",   "drinks a cup of tea",      "talks to a neighbour",
      "writes a short letter", "cleans the old boots",     "feeds the brown cat",
      "counts the coins",      "listens to the rain",      "folds the clean shirts",
      "greets the visitors",   "repairs the wooden chair", "waters the flowers"};
  static constexpr std::array<std::string_view, 8> times{
      "in the morning", "before lunch", "on Monday", "after dinner",
      "every evening",  "on weekends",  "at noon",   "in the spring"};
  return " The " + trade + " named " + person + " " + std::string(acts[draw.below(acts.size())]) +
         " " + std::string(times[draw.below(times.size())]) + ".";
}

}  // namespace detail

/// One fact set for `agents` agents: `facts` single-hop facts dealt out to them, `questions`
/// questions spread evenly over the agents, and `neutral_per_agent` sentences beside the facts.
/// Two-hop sets hold two sentences a question.
inline FactSet make_fact_set(Task task, std::size_t agents, std::uint64_t seed, std::size_t index,
                             std::size_t facts, std::size_t questions,
                             std::size_t neutral_per_agent) {
  Draw draw(seed * 1000003u + index * 7919u + agents * 101u +
            (task == Task::single ? 0u : 1u) * 13u);
  draw.next();
  FactSet set;
  set.notes.resize(agents);
  std::vector<std::string> people = draw.pick(detail::people, detail::people.size());
  std::vector<std::string> trades = draw.pick(detail::trades, detail::trades.size());
  const std::vector<std::string> things = draw.pick(detail::things, detail::things.size());
  const std::vector<std::string> places = draw.pick(detail::places, detail::places.size());
  std::size_t next_person = 0;
  const auto candidates_with = [&draw](const std::vector<std::string>& pool, std::size_t count) {
    std::vector<std::string> out(
        pool.begin(),
        pool.begin() + static_cast<std::ptrdiff_t>(count < pool.size() ? count : pool.size()));
    draw.shuffle(out);
    return out;
  };
  if (task == Task::single) {
    for (std::size_t fact = 0; fact < facts; ++fact) {
      const std::size_t agent = fact % agents;
      const std::string& person = people[next_person++];
      const std::string colour(detail::colours[draw.below(detail::colours.size())]);
      const std::string object = colour + " " + things[fact % things.size()];
      const std::string& place = places[fact % places.size()];
      set.notes[agent].push_back(" The " + trades[fact % trades.size()] + " named " + person +
                                 " keeps the " + object + " in the " + place + ".");
      if (set.questions.size() < questions)
        set.questions.push_back({{person + " keeps the " + object + " in the", place,
                                  candidates_with(places, facts > 16 ? facts : 16)},
                                 {}});
    }
  } else {
    // Chain q: person a works for person b (one agent); b keeps an object in a place (another
    // agent).
    const std::vector<std::string> owners(people.begin() + 8, people.begin() + 16);
    for (std::size_t chain = 0; chain < 8; ++chain) {
      const std::string& helper = people[chain];
      const std::string& owner = owners[chain];
      set.notes[chain % agents].push_back(" The " + trades[chain] + " named " + helper +
                                          " works for " + owner + ".");
      const std::string object =
          std::string(detail::colours[draw.below(detail::colours.size())]) + " " + things[chain];
      set.notes[(chain + 1) % agents].push_back(" The " + trades[8 + chain] + " named " + owner +
                                                " keeps the " + object + " in the " +
                                                places[chain] + ".");
      if (set.questions.size() >= questions) continue;
      Question question;
      question.last.answer = places[chain];
      question.last.candidates = candidates_with(places, 8);
      if (task == Task::two_hop) {
        question.last.start = "The boss of " + helper + " keeps things in the";
      } else {
        question.link = {helper + " works for", owner, owners};
        question.last.start = "@ keeps things in the";
      }
      set.questions.push_back(std::move(question));
    }
    next_person = 16;
  }
  for (std::size_t agent = 0; agent < agents; ++agent) {
    draw.shuffle(set.notes[agent]);
    for (std::size_t i = 0; i < neutral_per_agent; ++i) {
      const std::string& person =
          people[next_person + (i * agents + agent) % (people.size() - next_person)];
      const std::string& trade = trades[draw.below(trades.size())];
      std::vector<std::string>& notes = set.notes[agent];
      notes.insert(notes.begin() + static_cast<std::ptrdiff_t>(draw.below(notes.size() + 1)),
                   detail::neutral(draw, person, trade));
    }
  }
  return set;
}

}  // namespace example
