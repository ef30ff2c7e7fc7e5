#pragma once
// Fields of aggregates, counted by the compiler: a test that changes each of them does not build
// while it leaves one out.

#include <cstddef>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace test {

namespace counting {

/// Initialises any field; only its type is ever looked at.
struct AnyField {
  template <class T>
  operator T() const;
};

template <class T, class... Fields>
constexpr std::size_t count_fields() {
  if constexpr (requires { T{Fields{}..., AnyField{}}; }) {
    return count_fields<T, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

}  // namespace counting

/// How many fields an aggregate has: the most that its braces take.
template <class T>
inline constexpr std::size_t field_count = std::is_empty_v<T> ? 0 : counting::count_fields<T>();

/// Values that differ in one field alone; the first is what the others are changed from.
template <class T>
struct FieldChanges {
  std::string name;
  std::size_t offset;  ///< of the field, so that none is named twice
  std::vector<T> values;
};

namespace counting {

template <class T, class V>
FieldChanges<T> changes_of(const T& base, std::string name, V T::*member) {
  const auto at = [](const void* p) { return static_cast<const char*>(p); };
  return {std::move(name), static_cast<std::size_t>(at(&(base.*member)) - at(&base)), {base}};
}

}  // namespace counting

/// A field that takes each of some other values in turn.
template <class T, class V>
FieldChanges<T> field(const T& base, std::string name, V T::*member,
                      std::initializer_list<std::type_identity_t<V>> others) {
  auto out = counting::changes_of(base, std::move(name), member);
  for (const V& other : others) {
    out.values.push_back(base);
    out.values.back().*member = other;
  }
  return out;
}

/// A field that is an aggregate itself, of which every field is changed.
template <class T, class V, class... Inner>
requires(std::is_same_v<Inner, FieldChanges<V>>&&...)
    FieldChanges<T> parts(const T& base, std::string name, V T::*member, const Inner&... inner) {
  static_assert(sizeof...(Inner) == field_count<V>, "this list leaves out a field of the part");
  auto out = counting::changes_of(base, std::move(name), member);
  const auto add = [&](const FieldChanges<V>& changes) {
    for (std::size_t i = 1; i < changes.values.size(); ++i) {
      out.values.push_back(base);
      out.values.back().*member = changes.values[i];
    }
  };
  (add(inner), ...);
  return out;
}

/// A field that is a list of aggregates: none, one, one with every field changed, two.
template <class T, class E, class... Inner>
requires(std::is_same_v<Inner, FieldChanges<E>>&&...)
    FieldChanges<T> elements(const T& base, std::string name, std::vector<E> T::*member,
                             const E& element, const Inner&... inner) {
  static_assert(sizeof...(Inner) == field_count<E>, "this list leaves out a field of the element");
  auto out = counting::changes_of(base, std::move(name), member);
  const auto add = [&](std::vector<E> list) {
    out.values.push_back(base);
    out.values.back().*member = std::move(list);
  };
  add({element});
  (
      [&](const FieldChanges<E>& changes) {
        for (std::size_t i = 1; i < changes.values.size(); ++i) {
          add({changes.values[i]});
          add({element, changes.values[i]});
          add({changes.values[i], element});
        }
      }(inner),
      ...);
  return out;
}

/// The changes of every field of T, which the compiler counts.
template <class T, class... Fields>
requires(std::is_same_v<Fields, FieldChanges<T>>&&...) std::vector<FieldChanges<T>> every_field(
    const Fields&... fields) {
  static_assert(sizeof...(Fields) == field_count<T>, "this list leaves out a field");
  return {fields...};
}

}  // namespace test
