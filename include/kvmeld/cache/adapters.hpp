#pragma once

/// What an engine laid over a model while it encoded, as part of the model's name: adapted K/V
/// never meets plain ones.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// How an adapter changes what a model computes.
enum class AdapterKind : std::uint8_t {
  lora,            ///< low-rank updates of weights (Hu et al. 2021, arXiv:2106.09685)
  control_vector,  ///< vectors added to the residual stream (Zou et al. 2023, arXiv:2310.01405)
};

/// One adapter as it is loaded.
struct Adapter {
  std::string name = {};  ///< tells it from every other: best a digest of its file
  float scale = 1.0F;     ///< finite, of either sign; 0: without effect, as if it were not loaded
  AdapterKind kind = AdapterKind::lora;
  std::int32_t first_layer =
      0;  ///< layers that it acts on, both ends included, as the engine counts
  std::int32_t last_layer = 0;  ///< 0 and 0: all that it has

  bool operator==(const Adapter&) const = default;
};

/// The adapters under which K/V is made, or that there are none; a default one says nothing and is
/// refused.
///
/// K/V made under a LoRA or a control vector fits no cache of the plain model, and its bytes do not
/// show it. So there is no default that means "none".
class Adapters {
 public:
  /// Nobody said.
  Adapters() = default;
  /// The model as it is.
  [[nodiscard]] static Adapters none() { return of({}); }
  /// These, in any order.
  [[nodiscard]] static Adapters of(std::vector<Adapter> loaded) {
    Adapters out;
    out.declared_ = true;
    out.loaded_ = std::move(loaded);
    return out;
  }

  [[nodiscard]] bool declared() const noexcept { return declared_; }
  [[nodiscard]] const std::vector<Adapter>& loaded() const noexcept { return loaded_; }

 private:
  bool declared_ = false;
  std::vector<Adapter> loaded_;
};

namespace detail {

KVMELD_LAZY [[nodiscard]] Status check_adapter(const Adapter& adapter, std::size_t index) {
  if (adapter.kind > AdapterKind::control_vector) {
    return error(ErrorCode::unknown_field, "adapter ", index, ": kind ",
                 static_cast<int>(adapter.kind), " is none that this build knows");
  }
  if (adapter.name.empty()) {
    return error(ErrorCode::invalid_argument, "adapter ", index,
                 " has no name; give what tells it from every other, ",
                 "best a digest of its file");
  }
  if (!std::isfinite(adapter.scale)) {
    return error(ErrorCode::invalid_argument, "adapter '", adapter.name, "': scale ", adapter.scale,
                 " is not finite");
  }
  if (adapter.first_layer < 0 || adapter.last_layer < adapter.first_layer) {
    return error(ErrorCode::invalid_argument, "adapter '", adapter.name, "': layers ",
                 adapter.first_layer, " to ", adapter.last_layer,
                 "; give an ascending range, or 0 and 0 for all");
  }
  return {};
}

}  // namespace detail

/// Names a model as it encodes under adapters: what belongs into `Geometry::model` of all K/V made
/// so.
///
/// Without adapters, or with none but scales of 0, it is `model` itself. Else `model`, "+adapters:"
/// and 32 hexadecimal digits: XXH3-128 of `Hasher`'s bytes of text "kvmeld.adapters.v1", u64 count,
/// and for each adapter, ascending by (kind, name, first layer, last layer): u8 kind, text name,
/// f32 scale, i32 first and i32 last layer. So the order in which they are listed does not matter,
/// nor does any locale. O(adapters log adapters). Errors: `invalid_argument` (nobody said; no name;
/// a scale that is not finite; a range of layers that descends; one adapter twice),
/// `unknown_field`.
KVMELD_LAZY [[nodiscard]] Result<std::string> adapted_model(std::string_view model,
                                                            const Adapters& adapters) {
  if (!adapters.declared()) {
    return detail::error(ErrorCode::invalid_argument, "adapters of model '", model,
                         "': nobody said which are loaded; ",
                         "write Adapters::none(), or list them with Adapters::of");
  }
  const auto place = [](const Adapter& a) {
    return std::tie(a.kind, a.name, a.first_layer, a.last_layer);
  };
  std::vector<Adapter> acting;
  for (std::size_t i = 0; i < adapters.loaded().size(); ++i) {
    const Adapter& adapter = adapters.loaded()[i];
    KVMELD_TRY(detail::check_adapter(adapter, i));
    if (adapter.scale < 0.0F || adapter.scale > 0.0F) acting.push_back(adapter);
  }
  std::sort(acting.begin(), acting.end(),
            [&](const Adapter& a, const Adapter& b) { return place(a) < place(b); });
  for (std::size_t i = 1; i < acting.size(); ++i) {
    if (place(acting[i - 1]) != place(acting[i])) continue;
    return detail::error(ErrorCode::invalid_argument, "adapter '", acting[i].name,
                         "' is listed twice, with scales ", acting[i - 1].scale, " and ",
                         acting[i].scale, "; list it once, with the scale that acts");
  }
  std::string name(model);
  if (acting.empty()) return name;
  Hasher hasher;
  hasher.text("kvmeld.adapters.v1");
  hasher.value(static_cast<std::uint64_t>(acting.size()));
  for (const Adapter& adapter : acting) {
    hasher.value(adapter.kind);
    hasher.text(adapter.name);
    hasher.value(adapter.scale);
    hasher.value(adapter.first_layer);
    hasher.value(adapter.last_layer);
  }
  return name + "+adapters:" + hasher.digest().hex();
}

KVMELD_NAMESPACE_END
