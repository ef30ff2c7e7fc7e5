#pragma once
// Questions over passages made from a seed: several forms of sentence, entities that recur over
// passages, and so over agents.

#include "dataset.hpp"
#include "quality_data.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace quality {

namespace detail {

inline constexpr std::array<std::string_view, 24> surnames{
    "Vogel", "Marsh",    "Okafor",   "Lindgren", "Castillo", "Whitaker", "Novak",  "Pereira",
    "Hale",  "Ibsen",    "Kowalski", "Duarte",   "Fleming",  "Tanaka",   "Abbott", "Moreau",
    "Quinn", "Sorensen", "Barlow",   "Ferrante", "Griffin",  "Holloway", "Jansen", "Keller"};
inline constexpr std::array<std::string_view, 16> towns{
    "Ashford", "Bramwell", "Corvina", "Dunmore",  "Elmstead", "Farrow",   "Glenhaven", "Harwick",
    "Ilmari",  "Jorvik",   "Kelso",   "Lindholm", "Marbury",  "Northolt", "Oakmere",   "Pinehurst"};
inline constexpr std::array<std::string_view, 16> firms{
    "Aurora Mills",   "Beacon Press",      "Cobalt Works",      "Delta Foundry",
    "Eagle Shipping", "Falcon Textiles",   "Granite Bank",      "Harbor Instruments",
    "Iris Glass",     "Juniper Foods",     "Keystone Timber",   "Lantern Books",
    "Meridian Tools", "Northern Ceramics", "Orchard Chemicals", "Pioneer Railways"};
inline constexpr std::array<std::string_view, 12> rivers{"Alder",  "Brent", "Cole", "Dove",
                                                         "Esk",    "Fenn",  "Gale", "Humber",
                                                         "Irwell", "Kern",  "Lune", "Medway"};
inline constexpr std::array<std::string_view, 12> goods{"clocks", "violins", "carpets", "paper",
                                                        "glass",  "cheese",  "boats",   "bells",
                                                        "wool",   "pottery", "salt",    "honey"};

struct Person {
  std::string name, trade;
  std::size_t town = 0, firm = 0;
  int born = 0;
};
struct Firm {
  std::string name;
  std::size_t town = 0, founder = 0;
  int founded = 0;
};
struct Town {
  std::string name, river, good;
  std::size_t mayor = 0;
};

/// Six people, three firms and three towns that speak of each other.
struct World {
  std::vector<Person> people;
  std::vector<Firm> firms;
  std::vector<Town> towns;
};

inline World make_world(example::Draw& draw) {
  const auto first = draw.pick(example::detail::people, 6);
  const auto last = draw.pick(surnames, 6);
  const auto trades = draw.pick(example::detail::trades, 6);
  const auto town_names = draw.pick(towns, 3), firm_names = draw.pick(firms, 3);
  const auto river_names = draw.pick(rivers, 3), good_names = draw.pick(goods, 3);
  const auto year = [&draw](std::size_t from, std::size_t span) {
    return static_cast<int>(from + draw.below(span));
  };
  World world;
  for (std::size_t i = 0; i < 6; ++i)
    world.people.push_back(
        {first[i] + " " + last[i], trades[i], draw.below(3), i % 3, year(1901 + 14 * i, 13)});
  draw.shuffle(world.people);
  for (std::size_t i = 0; i < 3; ++i) {
    world.firms.push_back({firm_names[i], i, draw.below(6), year(1840, 55)});
    world.towns.push_back({town_names[i], river_names[i], good_names[i], draw.below(6)});
  }
  return world;
}

inline std::string text_of(const World& world, const Person& p, example::Draw& draw) {
  const std::string town = world.towns[p.town].name, firm = world.firms[p.firm].name;
  const std::string born = std::to_string(p.born);
  switch (draw.below(4)) {
    case 0:
      return p.name + " (born " + born + " in " + town + ") is a " + p.trade +
             ". Since leaving school, " + p.name + " has worked for " + firm + ".";
    case 1:
      return "A " + p.trade + " by training, " + p.name + " grew up in " + town + ", " +
             "where the family had settled before " + born + ", the year of birth. The employer " +
             "is " + firm + ".";
    case 2:
      return "Few in " + town + " do not know " + p.name + ", the " + p.trade + " who was born " +
             "there in " + born + ". " + firm + " hired " + p.name + " after a short interview.";
    default:
      return "In " + born + ", " + p.name + " was born in the town of " + town + ". Today the " +
             p.trade + " is on the staff of " + firm + " and writes letters to the newspaper.";
  }
}

inline std::string text_of(const World& world, const Firm& f, example::Draw& draw) {
  const std::string town = world.towns[f.town].name, founder = world.people[f.founder].name;
  const std::string founded = std::to_string(f.founded);
  switch (draw.below(3)) {
    case 0:
      return f.name + " is a company with its seat in " + town + ". It was founded in " + founded +
             ". Its present chair is " + founder + ".";
    case 1:
      return "Established in " + founded + ", " + f.name + " has its offices beside the station " +
             "of " + town + ". The board is led by " + founder + ".";
    default:
      return "Visitors to " + town + " see the tall chimneys of " + f.name +
             ", a firm that dates " + "from " + founded + ". " + founder + " chairs the company.";
  }
}

inline std::string text_of(const World& world, const Town& t, example::Draw& draw) {
  const std::string mayor = world.people[t.mayor].name;
  switch (draw.below(3)) {
    case 0:
      return t.name + " is a town on the river " + t.river + ". It is known for its " + t.good +
             ". The mayor is " + mayor + ".";
    case 1:
      return "The river " + t.river + " flows through " + t.name +
             ", a market town that has sold " + t.good + " for centuries. " + mayor +
             " was elected mayor there.";
    default:
      return "Known far away for " + t.good + ", " + t.name + " lies where the road crosses the " +
             t.river + ". Its council is headed by its mayor, " + mayor + ".";
  }
}

/// Of one hop, two hops, a comparison, or of something that no passage tells, by turns.
inline void ask_of(const World& world, std::size_t kind, example::Draw& draw, Item& item) {
  const std::size_t a = draw.below(6), b = (a + 1 + draw.below(5)) % 6;
  const Person& p = world.people[a];
  const Firm& f = world.firms[p.firm];
  const Town& seat = world.towns[f.town];
  switch (kind) {
    case 0:
      item.source = "one hop";
      item.question = "Which company does " + p.name + " work for?";
      item.answers = {f.name};
      return;
    case 1:
      item.source = "two hops";
      item.question = "In which town is the company that " + p.name + " works for?";
      item.answers = {seat.name};
      return;
    case 2:
      item.source = "comparison";
      item.question = "Who was born first, " + p.name + " or " + world.people[b].name + "?";
      item.answers = {p.born < world.people[b].born ? p.name : world.people[b].name};
      return;
    default:
      item.source = "none of them says";
      item.question =
          "Which instrument does " + p.name + " play? If no passage says it, answer \"not said\".";
      item.answers = {"not said"};
  }
}

}  // namespace detail

/// The same on every machine. Twelve passages a question.
inline std::vector<Item> make_items(std::size_t count, std::uint64_t seed) {
  std::vector<Item> items;
  for (std::size_t i = 0; i < count; ++i) {
    example::Draw draw(seed * 1000003u + i * 7919u + 5u);
    draw.next();
    const detail::World world = detail::make_world(draw);
    Item item;
    item.id = "made" + std::to_string(i);
    for (const auto& p : world.people)
      item.passages.push_back({p.name, detail::text_of(world, p, draw)});
    for (const auto& f : world.firms)
      item.passages.push_back({f.name, detail::text_of(world, f, draw)});
    for (const auto& t : world.towns)
      item.passages.push_back({t.name, detail::text_of(world, t, draw)});
    detail::ask_of(world, i % 4, draw, item);
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace quality
